#include "bagualu/schedule/pipeline_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <vector>

#include "bagualu/base/error.h"
#include "bagualu/schedule/overlap_order.h"

namespace bagualu {
namespace {

constexpr int kMaxNumber = 1 << 20;

// "12" at the front of text, which it takes off; -1 if there is none or it is too large.
int take_number(std::string_view& text) {
  int value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || value < 0 || value > kMaxNumber || text.front() == '-') return -1;
  // One text per pass: no leading zero.
  if (end - text.data() > 1 && text.front() == '0') return -1;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return value;
}

std::optional<PipelinePass> parse_pass(std::string_view token) {
  PipelinePass pass;
  pass.stage = take_number(token);
  if (pass.stage < 0 || token.empty()) return std::nullopt;
  const size_t kind = kPassLetters.find(token.front());
  if (kind == std::string_view::npos) return std::nullopt;
  pass.kind = static_cast<PassKind>(kind);
  token.remove_prefix(1);
  pass.microbatch = token.empty() ? -1 : take_number(token);
  if (pass.microbatch < 0 || !token.empty()) return std::nullopt;
  return pass;
}

std::string lists_text(const PipelineOrder& order, const std::vector<std::vector<bool>>* fused) {
  std::string text;
  for (size_t r = 0; r < order.ranks.size(); ++r) {
    const auto& list = order.ranks[r];
    bool second = false;
    for (size_t i = 0; i < list.size(); ++i) {
      const bool first = fused != nullptr && (*fused)[r][i];
      if (i > 0) text += second ? '|' : ' ';
      if (first) text += '[';
      text += pass_text(list[i]);
      if (second) text += ']';
      second = first;
    }
    text += '\n';
  }
  return text;
}

class ListParser {
 public:
  ListParser(const std::string& where, bool slots) : where_(where), slots_(slots) {}

  OverlapOrder parse(std::string_view text) {
    while (!text.empty()) {
      const std::string_view line = text.substr(0, text.find('\n'));
      text.remove_prefix(std::min(line.size() + 1, text.size()));
      order_.order.ranks.emplace_back();
      order_.fused.emplace_back();
      tokens_ = 0;
      for (size_t begin = 0; begin < line.size();) {
        const size_t end = std::min(line.find(' ', begin), line.size());
        if (end > begin) take(line.substr(begin, end - begin));
        begin = end + 1;
      }
    }
    if (order_.order.stages == 0) {
      throw InvalidInput(where_, "line 1, token 1", "nothing", "passes of rank 0, as 0F0 0B0");
    }
    return std::move(order_);
  }

 private:
  void take(std::string_view token) {
    ++tokens_;
    const size_t bar = token.find('|');
    const bool slot = slots_ && token.front() == '[' && token.back() == ']' && bar < token.size();
    if (!slot) {
      add(parse_pass(token), token, false);
      return;
    }
    add(parse_pass(token.substr(1, bar - 1)), token, true);
    add(parse_pass(token.substr(bar + 1, token.size() - bar - 2)), token, false);
  }

  void add(const std::optional<PipelinePass>& pass, std::string_view token, bool fused) {
    if (!pass) {
      std::string allowed = "stage, one of F B I W R O L, micro-batch, as 2F0";
      if (slots_) allowed += "; or a slot of two, as [2F3|2B0]";
      throw InvalidInput(where_, fmt::format("line {}, token {}", order_.fused.size(), tokens_),
                         std::string(token.substr(0, 40)), allowed);
    }
    PipelineOrder& order = order_.order;
    order.stages = std::max(order.stages, pass->stage + 1);
    order.microbatches = std::max(order.microbatches, pass->microbatch + 1);
    order.ranks.back().push_back(*pass);
    order_.fused.back().push_back(fused);
  }

  const std::string& where_;
  bool slots_;
  OverlapOrder order_;
  size_t tokens_ = 0;  // of this line
};

}  // namespace

std::string order_text(const PipelineOrder& order) { return lists_text(order, nullptr); }

std::string order_text(const OverlapOrder& order) { return lists_text(order.order, &order.fused); }

PipelineOrder parse_order(std::string_view text, const std::string& where) {
  return ListParser(where, false).parse(text).order;
}

OverlapOrder parse_overlap_order(std::string_view text, const std::string& where) {
  return ListParser(where, true).parse(text);
}

}  // namespace bagualu
