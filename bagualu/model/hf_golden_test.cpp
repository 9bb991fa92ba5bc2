// Every config.json in tests/data/hf_configs, which transformers wrote, with its own count of
// parameters (python/tests/hf_golden.py makes the files).

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/model/hf_config.h"
#include "bagualu/model/parameters.h"

namespace bagualu {
namespace {

struct Golden {
  std::string name;
  int64_t parameters = 0;
  int64_t active = 0;
  Json config;
};

std::vector<Golden> read_golden(const std::filesystem::path& path) {
  std::vector<Golden> rows;
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const Json row = parse_json_object(line, path.string());
    rows.push_back({row.at("name"), row.at("parameters"), row.at("active"), row.at("config")});
  }
  return rows;
}

const std::vector<Golden>& all_golden() {
  static const std::vector<Golden> all = [] {
    std::vector<Golden> rows;
    std::vector<std::filesystem::path> paths;
    for (const auto& entry :
         std::filesystem::directory_iterator(BAGUALU_SOURCE_DIR "/tests/data/hf_configs")) {
      paths.push_back(entry.path());
    }
    std::sort(paths.begin(), paths.end());
    for (const auto& path : paths) {
      for (Golden& row : read_golden(path)) rows.push_back(std::move(row));
    }
    return rows;
  }();
  return all;
}

std::vector<Golden> published() {
  return read_golden(BAGUALU_SOURCE_DIR "/tests/data/hf_configs/published.jsonl");
}

TEST(HfGolden, CountsWhatTransformersCounts) {
  std::set<std::string> families;
  for (const Golden& golden : all_golden()) {
    SCOPED_TRACE(golden.name);
    const ModelSpec spec = read_hf_config(golden.config, golden.name).spec;
    families.insert(golden.config.at("model_type").get<std::string>());
    EXPECT_EQ(total_parameters(spec), golden.parameters);
    EXPECT_EQ(active_parameters(spec), golden.active);
  }
  const std::vector<std::string>& known = hf_families();
  EXPECT_EQ(families, std::set<std::string>(known.begin(), known.end()));
}

TEST(HfGolden, NativeFilesHoldEveryModel) {
  for (const Golden& golden : all_golden()) {
    const ModelSpec spec = read_hf_config(golden.config, golden.name).spec;
    EXPECT_EQ(model_from_json(to_json(spec), golden.name), spec) << golden.name;
  }
}

TEST(HfGolden, OlderFilesGiveTheSameModel) {
  int compared = 0;
  for (size_t i = 1; i < all_golden().size(); ++i) {
    const Golden& older = all_golden()[i];
    const Golden& newer = all_golden()[i - 1];
    if (older.name != newer.name + ", older") continue;
    ++compared;
    EXPECT_EQ(read_hf_config(older.config, older.name).spec,
              read_hf_config(newer.config, newer.name).spec)
        << older.name;
  }
  EXPECT_EQ(compared, 14);
}

TEST(HfGolden, PredictionLayersAreCountedApart) {
  for (const Golden& golden : all_golden()) {
    const ModelSpec spec = read_hf_config(golden.config, golden.name).spec;
    EXPECT_EQ(spec.mtp_layers, golden.config.value("num_nextn_predict_layers", 0)) << golden.name;
    EXPECT_EQ(mtp_parameters(spec) > 0, spec.mtp_layers > 0) << golden.name;
  }
}

TEST(HfGolden, IgnoredKeysChangeNothing) {
  for (const Golden& golden : all_golden()) {
    SCOPED_TRACE(golden.name);
    const ReadModel read = read_hf_config(golden.config, golden.name);
    for (const std::string& key : read.ignored) {
      Json less = golden.config;
      const bool nested = key.starts_with("text_config.");
      Json& object = nested ? less.at("text_config") : less;
      ASSERT_EQ(object.erase(nested ? key.substr(12) : key), 1u) << key;
      // RoPE's base is read from the object whose scaling is ignored; some keys bound others.
      if (key.ends_with("rope_parameters") || key.ends_with("rope_scaling") ||
          key.ends_with("max_position_embeddings")) {
        continue;
      }
      EXPECT_EQ(read_hf_config(less, golden.name).spec, read.spec) << key;
    }
  }
}

TEST(HfGolden, EveryOtherKeyIsUnknownByAnotherName) {
  for (const Golden& golden : published()) {
    Json object = golden.config;
    object["num_hidden_layer"] = 2;
    try {
      read_hf_config(object, golden.name);
      ADD_FAILURE() << golden.name;
    } catch (const InvalidInput& error) {
      EXPECT_EQ(error.field(), "num_hidden_layer");
      EXPECT_EQ(error.where(), golden.name);
    }
  }
}

TEST(HfGolden, RuntimeRefusesWhatItCannotTrain) {
  for (const Golden& golden : all_golden()) {
    const ModelSpec spec = read_hf_config(golden.config, golden.name).spec;
    const bool trained = spec.family == "mixtral" || spec.family == "qwen3_moe";
    if (!trained) EXPECT_NE(planned_only_feature(spec), "") << golden.name;
  }
}

TEST(ModelPresets, AreThePublishedConfigs) {
  for (const Golden& golden : published()) {
    ModelSpec preset =
        model_from_file(BAGUALU_SOURCE_DIR "/configs/models/" + golden.name + ".json");
    ModelSpec spec = read_hf_config(golden.config, golden.name).spec;
    EXPECT_EQ(preset.name, golden.name);
    spec.name = preset.name;
    // Training options, in no such file.
    preset.aux_loss_coef = preset.z_loss_coef = preset.router_bias_rate = 0;
    EXPECT_EQ(preset, spec) << golden.name;
  }
}

struct Published {
  const char* preset;
  double total;      // of the model card, without multi-token prediction layers
  double active;     // the same; 0: dense
  double tolerance;  // the card's rounding
};

// Model cards and papers: total and active parameters in billions. Some cards leave embeddings out
// of the active ones: gpt-oss counts the output matrix but not the embedding (4.19 - 0.58 = 3.61
// and 5.71 - 0.58 = 5.13), GLM-4.5 neither (33.6 - 1.55, 13.4 - 1.24), OLMoE and granite all.
TEST(ModelPresets, HaveThePublishedNumberOfParameters) {
  const std::vector<Published> cards = {
      {"mixtral-8x7b", 46.7, 12.9, 0.005},
      {"mixtral-8x22b", 141, 39, 0.01},
      {"qwen1.5-moe-a2.7b", 14.3, 2.7, 0.01},
      {"qwen2-57b-a14b", 57.4, 14.2, 0.005},
      {"qwen3-30b-a3b", 30.5, 3.3, 0.02},
      {"qwen3-235b-a22b", 235, 22, 0.01},
      {"deepseek-v2", 236, 21, 0.02},
      {"deepseek-v2-lite", 15.7, 2.4 + 0.21, 0.02},  // card without the embedding of 0.21
      {"deepseek-v3", 671, 37, 0.02},
      {"kimi-k2", 1030, 32, 0.03},
      {"glm-4.5", 355, 32 + 1.55, 0.01},
      {"glm-4.5-air", 106, 12 + 1.24, 0.02},
      {"gpt-oss-20b", 20.91, 3.61 + 0.579, 0.001},
      {"gpt-oss-120b", 116.83, 5.13 + 0.579, 0.001},
      {"llama-4-scout", 109 - 0.9, 17, 0.015},  // card with a vision encoder of 0.9
      {"llama-4-maverick", 400, 17, 0.015},
      {"olmoe-1b-7b", 6.9, 1.3, 0.02},
      {"granite-3.0-1b-a400m", 1.33, 0.43, 0.01},
      {"granite-3.0-3b-a800m", 3.3, 0.88, 0.01},
      {"llama-2-70b", 69.0, 0, 0.005},
      {"llama-3-70b", 70.6, 0, 0.005},
      {"llama-3-405b", 405.9, 0, 0.005},
      {"qwen2.5-7b", 7.61, 0, 0.005},
      {"qwen3-8b", 8.2, 0, 0.005},
      {"mistral-7b", 7.24, 0, 0.005},
  };
  EXPECT_GE(cards.size(), 15u);
  for (const Published& card : cards) {
    const std::string name = card.preset;
    const ModelSpec spec = model_from_file(BAGUALU_SOURCE_DIR "/configs/models/" + name + ".json");
    const auto billions = [](int64_t n) { return static_cast<double>(n) * 1e-9; };
    EXPECT_NEAR(billions(total_parameters(spec)), card.total, card.tolerance * card.total) << name;
    const double active = card.active > 0 ? card.active : card.total;
    EXPECT_NEAR(billions(active_parameters(spec)), active, card.tolerance * active) << name;
  }
}

}  // namespace
}  // namespace bagualu
