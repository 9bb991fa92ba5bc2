// Pipeline orders: made and simulated, fitted to unequal stages, and their figures in closed form.
#include <benchmark/benchmark.h>

#include "bagualu/schedule/pipeline_figures.h"
#include "bagualu/schedule/pipeline_fit.h"

namespace bagualu {
namespace {

void order(benchmark::State& state, PipelineKind kind) {
  const int pp = static_cast<int>(state.range(0));
  const int microbatches = static_cast<int>(state.range(1));
  for (auto _ : state) {
    const PipelineOrder made = make_order(kind, pp, 2, microbatches);
    benchmark::DoNotOptimize(simulate(made, equal_times(made, PassTimes{})).makespan_ns);
  }
}

// Every stage a fifth slower than the one before, so that no bound ends the search early.
void fitted(benchmark::State& state) {
  const int pp = static_cast<int>(state.range(0));
  const int microbatches = static_cast<int>(state.range(1));
  PipelineTimes times =
      equal_times(make_order(PipelineKind::kZbV, pp, 2, microbatches), PassTimes{10, 11, 8, 1});
  for (size_t s = 0; s < times.forward_ns.size(); ++s) {
    for (int64_t& ns : times.forward_ns[s]) ns += static_cast<int64_t>(s % 5) * 2;
  }
  for (auto _ : state) {
    const PipelineOrder made = fitted_order(PipelineKind::kZbV, pp, 2, microbatches, times);
    benchmark::DoNotOptimize(simulate(made, times).makespan_ns);
  }
}

void closed_form(benchmark::State& state) {
  const int pp = static_cast<int>(state.range(0));
  const int microbatches = static_cast<int>(state.range(1));
  for (auto _ : state) {
    for (int rank = 0; rank < pp; ++rank) {
      benchmark::DoNotOptimize(closed_in_flight(PipelineKind::kZbV, pp, 2, microbatches, rank));
    }
    benchmark::DoNotOptimize(
        closed_makespan_ns(PipelineKind::kZbV, pp, 2, microbatches, PassTimes{}));
  }
}

void sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"p", "m"})->Args({8, 32})->Args({16, 64})->Args({32, 128});
  bench->Unit(benchmark::kMillisecond);
}

BENCHMARK_CAPTURE(order, 1f1b, PipelineKind::k1F1B)->Name("BM_Order/1f1b")->Apply(sizes);
BENCHMARK_CAPTURE(order, interleaved, PipelineKind::kInterleaved)
    ->Name("BM_Order/interleaved")
    ->Apply(sizes);
BENCHMARK_CAPTURE(order, zbh1, PipelineKind::kZbH1)->Name("BM_Order/zbh1")->Apply(sizes);
BENCHMARK_CAPTURE(order, zbv, PipelineKind::kZbV)->Name("BM_Order/zbv")->Apply(sizes);
BENCHMARK_CAPTURE(order, vhalf, PipelineKind::kVHalf)->Name("BM_Order/vhalf")->Apply(sizes);
BENCHMARK_CAPTURE(order, dualpipev, PipelineKind::kDualPipeV)
    ->Name("BM_Order/dualpipev")
    ->Apply(sizes);
BENCHMARK(fitted)->Name("BM_FittedOrder/zbv")->Apply(sizes);
BENCHMARK(closed_form)->Name("BM_ClosedForm/zbv")->Apply(sizes);

}  // namespace
}  // namespace bagualu
