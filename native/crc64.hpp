// CRC-64/NVME (reflected, polynomial 0xAD93D23594C93659, all ones before and after), alone and fused with a copy.
//
// 128-bit folding with carry-less multiplication where the CPU has it, a table elsewhere. Constants are computed here
// from the polynomial. Checksums of parts combine to that of the whole, so threads may share a storage.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace keepstep::crc64 {

using std::size_t;
using std::uint64_t;
using std::uint8_t;

constexpr uint64_t kPolynomial = 0x9A6C9329AC4BC9B5ull;  // reflected: bit 63 stands for x^0

constexpr uint64_t times_x(uint64_t value) { return (value >> 1) ^ ((value & 1) ? kPolynomial : 0); }

constexpr uint64_t power_of_x(unsigned exponent) {
  uint64_t value = 1ull << 63;
  for (unsigned i = 0; i < exponent; ++i) value = times_x(value);
  return value;
}

constexpr uint64_t times(uint64_t a, uint64_t b) {
  uint64_t product = 0;
  for (int bit = 63; bit >= 0; --bit) {
    if ((b >> bit) & 1) product ^= a;
    a = times_x(a);
  }
  return product;
}

using Table = std::array<std::array<uint64_t, 256>, 8>;

constexpr Table make_table() {
  Table table{};
  for (unsigned byte = 0; byte < 256; ++byte) {
    uint64_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = times_x(value);
    table[0][byte] = value;
  }
  for (unsigned byte = 0; byte < 256; ++byte)
    for (unsigned k = 1; k < 8; ++k)
      table[k][byte] = (table[k - 1][byte] >> 8) ^ table[0][table[k - 1][byte] & 0xFF];
  return table;
}

inline constexpr Table kTable = make_table();

// Each of these takes and gives the bare register, without the ones before and after.

inline uint64_t update_bytes(uint64_t crc, const uint8_t* data, size_t count) {
  for (; count >= 8; count -= 8, data += 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= crc;  // little endian, as everywhere in this file
    crc = 0;
    for (unsigned k = 0; k < 8; ++k) crc ^= kTable[7 - k][(word >> (8 * k)) & 0xFF];
  }
  for (; count != 0; --count, ++data) crc = (crc >> 8) ^ kTable[0][(crc ^ *data) & 0xFF];
  return crc;
}

#if defined(__x86_64__)

struct Fold {
  uint64_t low, high;  // multiply the earlier and the later 64 bits
};

// A carry-less product of reflected words stands for x times what it should be: hence the -1.
constexpr Fold fold_over(unsigned bits) { return {power_of_x(bits + 63), power_of_x(bits - 1)}; }

inline constexpr unsigned kLanes = 8;
inline constexpr size_t kStride = 16 * kLanes;
inline constexpr Fold kFoldStride = fold_over(128 * kLanes);
inline constexpr Fold kFoldLane = fold_over(128);

__attribute__((target("pclmul,sse4.1"))) inline __m128i folded(__m128i x, __m128i by) {
  return _mm_xor_si128(_mm_clmulepi64_si128(x, by, 0x00), _mm_clmulepi64_si128(x, by, 0x11));
}

// With kCopy, `to` (a multiple of 16) gets the very bytes that were summed, past the caches.
template <bool kCopy>
__attribute__((target("pclmul,sse4.1"))) inline uint64_t update_folding(uint64_t crc, const uint8_t* data, uint8_t* to,
                                                                       size_t count) {
  if (count >= 2 * kStride) {
    const __m128i stride = _mm_set_epi64x(static_cast<long long>(kFoldStride.high), static_cast<long long>(kFoldStride.low));
    const __m128i lane = _mm_set_epi64x(static_cast<long long>(kFoldLane.high), static_cast<long long>(kFoldLane.low));
    __m128i x[kLanes];
    for (unsigned i = 0; i < kLanes; ++i) {
      x[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i);
      if (kCopy) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, x[i]);
    }
    x[0] = _mm_xor_si128(x[0], _mm_set_epi64x(0, static_cast<long long>(crc)));
    data += kStride, to += kCopy ? kStride : 0, count -= kStride;
    for (; count >= kStride; data += kStride, to += kCopy ? kStride : 0, count -= kStride) {
      for (unsigned i = 0; i < kLanes; ++i) {
        const __m128i next = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data) + i);
        if (kCopy) _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, next);
        x[i] = _mm_xor_si128(folded(x[i], stride), next);
      }
    }
    for (unsigned i = 1; i < kLanes; ++i) x[i] = _mm_xor_si128(folded(x[i - 1], lane), x[i]);
    uint8_t rest[16];
    std::memcpy(rest, &x[kLanes - 1], 16);
    crc = update_bytes(0, rest, 16);
    if (kCopy) _mm_sfence();
  }
  if (count != 0) {
    if (kCopy) {
      std::memcpy(to, data, count);
      data = to;
    }
    crc = update_bytes(crc, data, count);
  }
  return crc;
}

inline bool can_fold() {
  static const bool can = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return can;
}

#endif

// The checksum of what has `crc` (0 before the first byte) followed by `count` bytes.
inline uint64_t extend(uint64_t crc, const void* data, size_t count) {
  const auto* bytes = static_cast<const uint8_t*>(data);
#if defined(__x86_64__)
  if (can_fold()) return ~update_folding<false>(~crc, bytes, nullptr, count);
#endif
  return ~update_bytes(~crc, bytes, count);
}

// Copies and gives the checksum of the bytes that stand at `to` afterwards, whoever changes `from` meanwhile.
inline uint64_t copy(void* to, const void* from, size_t count) {
  auto* target = static_cast<uint8_t*>(to);
  const auto* source = static_cast<const uint8_t*>(from);
  uint64_t crc = ~0ull;
#if defined(__x86_64__)
  if (can_fold()) {
    const size_t head = (16 - reinterpret_cast<std::uintptr_t>(target) % 16) % 16;
    const size_t first = head < count ? head : count;
    std::memcpy(target, source, first);
    crc = update_bytes(crc, target, first);
    return ~update_folding<true>(crc, source + first, target + first, count - first);
  }
#endif
  constexpr size_t kBlock = 1 << 15;  // summed while it is in the first cache
  for (size_t done = 0; done < count; done += kBlock) {
    const size_t size = count - done < kBlock ? count - done : kBlock;
    std::memcpy(target + done, source + done, size);
    crc = update_bytes(crc, target + done, size);
  }
  return ~crc;
}

// The checksum of a part that has `first`, followed by one of `count` bytes that has `second`.
inline uint64_t combine(uint64_t first, uint64_t second, uint64_t count) {
  uint64_t shift = 1ull << 63, square = power_of_x(8);
  for (; count != 0; count >>= 1, square = times(square, square))
    if (count & 1) shift = times(shift, square);
  return times(first, shift) ^ second;
}

}  // namespace keepstep::crc64
