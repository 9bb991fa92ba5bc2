// Speed of the simulator's engine: one replica of 16 pipeline ranks of 32 members, 4 MoE layers a
// rank, 64 micro-batches, operator by operator.
#include <cmath>
#include <deque>
#include <string>
#include <vector>

#include "bagualu/schedule/pipeline.h"
#include "bagualu/sim/engine.h"
#include "figures.h"

namespace bagualu {
namespace {

constexpr int kRanks = 16, kMembers = 32, kLayers = 4, kMicrobatches = 64;
constexpr int64_t kTokens = 4096, kHidden = 7168, kRows = 4096;

class Writer {
 public:
  explicit Writer(int64_t slower_ns) {
    for (int i = 0; i < kFixedTimes; ++i) {
      program_.times.push_back({{{kTokens, 200'000 + 7'000 * i + slower_ns}}});
    }
    for (int i = 0; i < 7; ++i) {
      program_.times.push_back({{{0, 30'000}, {kRows, 400'000 + 9'000 * i + slower_ns}}});
    }
    program_.tokens = kTokens;
    program_.cells = kLayers * kMicrobatches;
  }

  /// 20 operators forward, 5 of them on rows; 22 backward, 7 of them on rows. Every operator makes
  /// bytes and has scratch; a forward keeps what its backward frees.
  void layer(int microbatch, int layer, bool forward) {
    const int32_t cell = microbatch * kLayers + layer;
    fixed_operators(10, forward);
    exchange(cell);
    row_operators(forward ? 5 : 7, cell, forward);
    exchange(cell);
    fixed_operators(5, forward);
  }

  void receive(int32_t number, bool gradient) {
    message(number, false, gradient);
    await();
  }
  void send(int32_t number, bool gradient) { message(number, true, gradient); }

  StepProgram take() { return std::move(program_); }

 private:
  void instruction(SimStep step, int32_t cell = -1, int32_t time = -1) {
    SimInstruction one;
    one.step = step;
    one.cell = cell;
    one.time = time;
    one.transfer = static_cast<int32_t>(program_.transfers.size()) - 1;
    one.bytes_begin = one.peak_bytes_end = one.bytes_end =
        static_cast<int32_t>(program_.bytes.size());
    program_.instructions.push_back(one);
  }
  void await() { instruction(SimStep::kAwait); }

  void bytes(const ByteFormula& kept, const ByteFormula& scratch, int32_t cell, bool forward) {
    SimInstruction& one = program_.instructions.back();
    program_.bytes.push_back({scratch, cell, 1});
    if (forward) program_.bytes.push_back({kept, cell, 1});
    one.peak_bytes_end = static_cast<int32_t>(program_.bytes.size());
    program_.bytes.push_back({scratch, cell, -1});
    if (!forward) program_.bytes.push_back({kept, cell, -1});
    one.bytes_end = static_cast<int32_t>(program_.bytes.size());
  }

  void fixed_operators(int count, bool forward) {
    for (int i = 0; i < count; ++i) {
      instruction(SimStep::kCompute, -1, i);
      bytes({.per_token = 2 * kHidden}, {.per_token = 4 * kHidden}, -1, forward);
    }
  }

  void row_operators(int count, int32_t cell, bool forward) {
    for (int i = 0; i < count; ++i) {
      instruction(SimStep::kCompute, cell, kFixedTimes + i);
      bytes({.per_row = 2 * kHidden}, {.per_row = 4 * kHidden}, cell, forward);
    }
  }

  void exchange(int32_t cell) {
    program_.transfers.push_back(
        {.kind = SimTransferKind::kExchange, .cell = cell, .bytes_per_row = 2 * kHidden});
    instruction(SimStep::kIssue);
    await();
  }

  void message(int32_t number, bool sends, bool gradient) {
    program_.transfers.push_back({.kind = SimTransferKind::kMessage,
                                  .message = number,
                                  .sends = sends,
                                  .gradient = gradient,
                                  .bytes = 2 * kTokens * kHidden});
    instruction(SimStep::kIssue);
  }

  static constexpr int kFixedTimes = 10;
  StepProgram program_;
};

StepProgram program_of(const PipelineOrder& order, int rank, int64_t slower_ns) {
  Writer writer(slower_ns);
  for (const PipelinePass& pass : order.ranks[static_cast<size_t>(rank)]) {
    const bool forward = pass.kind == PassKind::kForward;
    const int before = forward ? rank - 1 : rank + 1, behind = forward ? rank + 1 : rank - 1;
    const auto number = [&](int from) {
      return ((forward ? 0 : kRanks) + from) * kMicrobatches + pass.microbatch;
    };
    if (before >= 0 && before < kRanks) writer.receive(number(before), !forward);
    for (int layer = 0; layer < kLayers; ++layer) {
      writer.layer(pass.microbatch, forward ? layer : kLayers - 1 - layer, forward);
    }
    if (behind >= 0 && behind < kRanks) writer.send(number(rank), !forward);
  }
  return writer.take();
}

struct Replica {
  std::deque<StepProgram> programs;
  std::vector<int32_t> rows;
  std::vector<SimGroup> groups;
};

/// Of every group, as many programs as `programs`, equally often.
Replica replica(int programs, bool prepared) {
  Replica made;
  uint64_t state = 1;
  for (int i = 0; i < kLayers * kMicrobatches * kMembers; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    made.rows.push_back(static_cast<int32_t>(kRows / 2 + (state >> 33) % kRows));
  }
  const PipelineOrder order = one_f_one_b(kRanks, kMicrobatches);
  for (int rank = 0; rank < kRanks; ++rank) {
    std::vector<const StepProgram*> own;
    for (int i = 0; i < programs; ++i) {
      made.programs.push_back(program_of(order, rank, i));
      if (prepared) prepare(&made.programs.back());
      own.push_back(&made.programs.back());
    }
    SimGroup group;
    for (int m = 0; m < kMembers; ++m) {
      group.programs.push_back(own[static_cast<size_t>(m % programs)]);
    }
    made.groups.push_back(group);
  }
  for (SimGroup& group : made.groups) group.rows = made.rows.data();
  return made;
}

SimLinks links() {
  SimLinks links;
  links.node_bytes_per_s = 200e9;
  links.network_bytes_per_s = links.message_bytes_per_s = 25e9;
  links.latency_ns = links.message_latency_ns = 10'000;
  links.d2h_bytes_per_s = links.h2d_bytes_per_s = 25e9;
  return links;
}

struct Rate {
  double per_s = 0;
  SimReplicaResult result;
};

Rate rate(int programs, bool prepared, int repeats) {
  const Replica made = replica(programs, prepared);
  SimEngine engine(links());
  Rate rate;
  const Spread spread = measure(repeats, cpu_ns, [&] { rate.result = engine.run(made.groups); });
  rate.per_s = static_cast<double>(rate.result.events) / spread.median;
  return rate;
}

void bench(bool quick) {
  const int repeats = quick ? 5 : 31;
  const Rate shared = rate(1, true, repeats);
  print("sim_events_per_s", "1/s", shared.per_s,
        {{"events", shared.result.events},
         {"counts", "operators and transfers of all members"},
         {"pipeline_ranks", kRanks},
         {"members", kMembers},
         {"microbatches", kMicrobatches},
         {"clock", "CPU time of the thread, median"},
         {"compiled_in_the_run", rate(1, false, repeats).per_s},
         {"four_programs_a_group", rate(4, true, repeats).per_s},
         {"own_program_each", rate(kMembers, true, quick ? 1 : 5).per_s},
         {"own_program_each_compiled_in_the_run", rate(kMembers, false, quick ? 1 : 5).per_s},
         {"simulated_step_ns", shared.result.end_ns},
         {"rival", "vTrain, nodes/s (Python and C++), 175B, 776424 nodes, same machine"},
         {"rival_value", 79e3}});
}

}  // namespace
}  // namespace bagualu

int main(int argc, char** argv) {
  bagualu::bench(bagualu::is_quick(argc, argv, "engine_bench"));
  return 0;
}
