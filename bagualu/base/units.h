#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace bagualu {

inline constexpr int64_t kKiB = int64_t{1} << 10;
inline constexpr int64_t kMiB = int64_t{1} << 20;
inline constexpr int64_t kGiB = int64_t{1} << 30;

/// Every storage, device or host, starts at and fills a multiple of this many bytes.
inline constexpr int64_t kStorageGranularityBytes = 64;

/// Smallest multiple of `granularity` that is at least `n`.
/// Requires: n >= 0, granularity > 0, the result fits int64.
int64_t round_up(int64_t n, int64_t granularity);

/// "96.0 MiB", "1.5 GiB", "512 B", "-2.0 KiB": one decimal from KiB on.
std::string format_bytes(int64_t bytes);

/// "850 ns", "12.3 us", "4.56 ms", "1.23 s".
std::string format_ns(int64_t ns);

/// Reads "96MiB", "1.5 GiB", "123", "64KB": KiB MiB GiB TiB are powers of 2^10, KB MB GB TB of
/// 10^3, no unit or B means bytes; a fraction is rounded down to whole bytes. Ensures: result >= 1.
/// Throws:  InvalidInput(where, field) on nonsense, zero, negative or overflow.
int64_t parse_bytes(std::string_view text, const std::string& where, const std::string& field);

}  // namespace bagualu
