#include "bagualu/runtime/ops/quantise.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "bagualu/base/error.h"
#include "bagualu/cost/block_codes.h"

namespace bagualu::ops {
namespace {

constexpr float kLargestCode = 127.0f;
constexpr int64_t kBlocksPerTask = 128;

// The scale of a block; NaN if one of its values is not finite, so that it does not vanish.
template <class T>
float scale_of(const T* values, int64_t n) {
  float largest = 0.0f;
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) {
    const float magnitude = std::fabs(static_cast<float>(values[i]));
    finite &= magnitude <= std::numeric_limits<float>::max();
    largest = std::max(largest, magnitude);
  }
  return finite ? largest / kLargestCode : std::numeric_limits<float>::quiet_NaN();
}

template <class T>
void encode_block(const T* values, int64_t n, float* scale, int8_t* codes) {
  *scale = scale_of(values, n);
  // A scale may underflow to 0; then every value of the block is as good as 0.
  const bool zeros = !(*scale > 0.0f);
  for (int64_t i = 0; i < n; ++i) {
    const float code = zeros ? 0.0f : std::nearbyint(static_cast<float>(values[i]) / *scale);
    codes[i] = static_cast<int8_t>(std::clamp(code, -kLargestCode, kLargestCode));
  }
}

template <class F>
void with_element(const at::Tensor& values, F&& f) {
  if (values.scalar_type() == at::kFloat) return f(static_cast<float*>(nullptr));
  BGL_CHECK(values.scalar_type() == at::kBFloat16, c10::toString(values.scalar_type()));
  f(static_cast<at::BFloat16*>(nullptr));
}

// Calls f(first element, elements, block) for every block.
template <class F>
void for_blocks(int64_t elements, F&& f) {
  at::parallel_for(0, code_blocks(elements), kBlocksPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kCodeBlockElements;
      f(first, std::min(kCodeBlockElements, elements - first), block);
    }
  });
}

void check(const at::Tensor& values, const at::Tensor& codes) {
  BGL_CHECK(values.is_non_overlapping_and_dense(), values.dim());
  BGL_CHECK(codes.scalar_type() == at::kByte && codes.is_contiguous(), codes.dim());
  BGL_CHECK(codes.numel() >= block_code_bytes(static_cast<int64_t>(values.nbytes()),
                                              static_cast<int64_t>(values.element_size())),
            codes.numel(), values.nbytes());
}

at::Tensor flat(const at::Tensor& values) { return values.as_strided({values.numel()}, {1}); }

// [scales fp32 [blocks], codes int8 [elements]], views of the buffer.
std::pair<at::Tensor, at::Tensor> parts(const at::Tensor& buffer, int64_t elements) {
  const int64_t scale_bytes = code_blocks(elements) * kCodeScaleBytes;
  return {buffer.narrow(0, 0, scale_bytes).view(at::kFloat),
          buffer.narrow(0, scale_bytes, elements).view(at::kChar)};
}

// Blocks as rows, the last one padded with zeros.
at::Tensor block_rows(const at::Tensor& row) {
  const int64_t blocks = code_blocks(row.numel());
  at::Tensor rows = at::zeros({blocks, kCodeBlockElements}, row.options().dtype(at::kFloat));
  rows.view({-1}).narrow(0, 0, row.numel()).copy_(row);
  return rows;
}

}  // namespace

void quantise_encode(const at::Tensor& values, at::Tensor& codes) {
  check(values, codes);
  if (values.numel() == 0) return;
  if (!values.device().is_cpu()) return detail::quantise_encode_aten(values, codes);
  auto* scales = reinterpret_cast<float*>(codes.data_ptr<uint8_t>());
  auto* code = reinterpret_cast<int8_t*>(scales + code_blocks(values.numel()));
  with_element(values, [&]<class T>(T*) {
    const T* value = values.const_data_ptr<T>();
    for_blocks(values.numel(), [&](int64_t first, int64_t n, int64_t block) {
      encode_block(value + first, n, scales + block, code + first);
    });
  });
}

void quantise_decode(const at::Tensor& codes, at::Tensor& values) {
  check(values, codes);
  if (values.numel() == 0) return;
  if (!values.device().is_cpu()) return detail::quantise_decode_aten(codes, values);
  const auto* scales = reinterpret_cast<const float*>(codes.const_data_ptr<uint8_t>());
  const auto* code = reinterpret_cast<const int8_t*>(scales + code_blocks(values.numel()));
  with_element(values, [&]<class T>(T*) {
    T* value = values.data_ptr<T>();
    for_blocks(values.numel(), [&](int64_t first, int64_t n, int64_t block) {
      for (int64_t i = first; i < first + n; ++i) {
        value[i] = static_cast<T>(static_cast<float>(code[i]) * scales[block]);
      }
    });
  });
}

namespace detail {

void quantise_encode_aten(const at::Tensor& values, at::Tensor& codes) {
  const at::Tensor row = flat(values);
  auto [scales, code] = parts(codes, row.numel());
  const at::Tensor rows = block_rows(row);
  at::Tensor scale = rows.abs().amax(1).div_(kLargestCode);
  scale.masked_fill_(rows.isfinite().all(1).logical_not(), std::numeric_limits<float>::quiet_NaN());
  scales.copy_(scale);
  const at::Tensor usable = scale.gt(0).unsqueeze(1);
  const at::Tensor scaled = rows.div(scale.unsqueeze(1)).round_().clamp_(-kLargestCode, kLargestCode);
  const at::Tensor rounded = at::where(usable, scaled, at::zeros({}, rows.options()));
  code.copy_(rounded.view({-1}).narrow(0, 0, row.numel()));
}

void quantise_decode_aten(const at::Tensor& codes, at::Tensor& values) {
  at::Tensor row = flat(values);
  const auto [scales, code] = parts(codes, row.numel());
  at::Tensor rows = block_rows(code).mul_(scales.unsqueeze(1));
  row.copy_(rows.view({-1}).narrow(0, 0, row.numel()));
}

}  // namespace detail
}  // namespace bagualu::ops
