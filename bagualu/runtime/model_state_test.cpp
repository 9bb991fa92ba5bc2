#include "bagualu/runtime/model_state.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "bagualu/graph/test_models.h"

namespace bagualu {
namespace {

ModelSpec model(bool tied) {
  ModelSpec spec = rich_moe_spec();
  spec.layers = 4;
  spec.moe_layer = {0, 1, 1, 1};
  spec.tied_embeddings = tied;
  return spec;
}

ParallelLayout layout_of(PipelineKind kind, int64_t pp, int64_t ep, std::vector<int64_t> layers) {
  ParallelLayout layout{.world_size = pp * ep, .ep_size = ep, .pp_size = pp, .pipeline = kind};
  layout.virtual_per_rank = kind == PipelineKind::kInterleaved ? 2 : 1;
  layout.stage_layers = std::move(layers);
  return layout;
}

std::vector<ParallelLayout> layouts() {
  return {layout_of(PipelineKind::k1F1B, 1, 2, {}), layout_of(PipelineKind::k1F1B, 2, 1, {3, 1}),
          layout_of(PipelineKind::kZbH1, 4, 2, {0, 2, 1, 1}),
          layout_of(PipelineKind::kInterleaved, 2, 2, {1, 1, 1, 1}),
          layout_of(PipelineKind::kDualPipeV, 2, 1, {1, 1, 2, 0})};
}

std::map<std::string, at::Tensor> by_name(const ModelState::NamedTensors& tensors) {
  return {tensors.begin(), tensors.end()};
}

// Ranks of any layout start from the tensors of one model; experts are cut by ep_rank.
TEST(ModelState, StartsFromTheSameWeightsUnderAnyLayout) {
  for (const bool tied : {false, true}) {
    const ModelSpec spec = model(tied);
    ModelState whole(spec, {}, Dtype::kFp32);
    whole.init_parameters(11, 0);
    const auto expected = by_name(whole.parameters());
    for (const ParallelLayout& layout : layouts()) {
      std::set<std::string> seen;
      for (int64_t rank = 0; rank < layout.world_size; ++rank) {
        ModelState part(spec, layout, Dtype::kFp32, layout.pp_rank(rank));
        const int64_t ep_rank = layout.ep_rank(rank);
        part.init_parameters(11, ep_rank);
        for (const auto& [name, tensor] : part.parameters()) {
          at::Tensor want = expected.at(name);
          if (name.find(".expert_fc") != std::string::npos) {
            const int64_t local = layout.experts_local(spec);
            want = want.narrow(0, ep_rank * local, local);
          }
          EXPECT_TRUE(at::equal(tensor, want)) << name;
          seen.insert(name);
        }
      }
      EXPECT_EQ(seen.size(), expected.size());
    }
  }
}

TEST(ModelState, HoldsTheLayersOfItsStagesUnderTheModelsNumbers) {
  const ModelSpec spec = model(false);
  const ParallelLayout layout = layout_of(PipelineKind::kInterleaved, 2, 1, {1, 1, 1, 1});
  ModelState second(spec, layout, Dtype::kFp32, 1);  // stages 1 and 3
  EXPECT_FALSE(second.holds_layer(0));
  EXPECT_TRUE(second.layer(1).router.weight.defined());
  EXPECT_TRUE(second.layer(3).expert_fc1.grad.defined());
  EXPECT_THROW(second.layer(2), InternalError);
  EXPECT_FALSE(second.embedding().weight.defined());
  EXPECT_TRUE(second.final_norm().weight.defined());
  std::vector<std::string> buffers;
  for (const auto& [name, tensor] : second.buffers()) buffers.push_back(name);
  EXPECT_EQ(buffers, (std::vector<std::string>{"layers.1.router_bias", "layers.3.router_bias"}));
}

TEST(ModelState, TiedHeadIsTheEmbeddingOfTheSameRank) {
  for (const Dtype dtype : {Dtype::kFp32, Dtype::kBf16}) {
    ModelState whole(model(true), {}, dtype);
    EXPECT_TRUE(whole.lm_head().weight.is_same(whole.embedding().weight));
    EXPECT_TRUE(whole.lm_head().grad.is_same(whole.embedding().grad));
    EXPECT_FALSE(whole.tied_gradient().defined());
    EXPECT_EQ(whole.counted_dense_gradient().numel(), whole.parameter_layout().dense_elements);
  }
}

TEST(ModelState, TiedHeadOfAnotherRankIsACopyThatNormsDoNotCount) {
  const ModelSpec spec = model(true);
  const ParallelLayout layout = layout_of(PipelineKind::k1F1B, 3, 1, {1, 2, 1});
  ModelState first(spec, layout, Dtype::kFp32, 0), middle(spec, layout, Dtype::kFp32, 1),
      last(spec, layout, Dtype::kFp32, 2);
  EXPECT_FALSE(first.lm_head().weight.defined());
  EXPECT_FALSE(last.embedding().weight.defined());
  EXPECT_FALSE(middle.tied_gradient().defined());
  last.lm_head().grad.fill_(2.0);
  EXPECT_EQ(last.tied_gradient().sum().item<float>(), 2.0f * 64 * 32);  // V h
  EXPECT_EQ(last.counted_dense_gradient().sum().item<float>(), 0.0f);
  first.embedding().grad.fill_(1.0);
  EXPECT_EQ(first.tied_gradient().sum().item<float>(), 1.0f * 64 * 32);
  EXPECT_EQ(first.counted_dense_gradient().sum().item<float>(), 1.0f * 64 * 32);
}

}  // namespace
}  // namespace bagualu
