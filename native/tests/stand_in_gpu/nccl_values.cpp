// The stand-in's NCCL: types and reductions.
#include <algorithm>
#include <cstring>

#include "nccl.hpp"

namespace stand_in {
namespace {

enum Reduction { kSum, kProduct, kMax, kMin, kAverage };

// bfloat16 and half as floats, and back, to nearest even where it matters for small whole numbers.
struct Bfloat {
  std::uint16_t bits;
  operator float() const {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
  static Bfloat of(float value) {
    std::uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    return {static_cast<std::uint16_t>((wide + 0x7fff + (wide >> 16 & 1)) >> 16)};
  }
};
struct Half {
  std::uint16_t bits;
  operator float() const {
    const auto value = reinterpret_cast<const _Float16*>(&bits);
    return static_cast<float>(*value);
  }
  static Half of(float value) {
    const auto narrow = static_cast<_Float16>(value);
    Half made;
    std::memcpy(&made.bits, &narrow, sizeof narrow);
    return made;
  }
};

template <typename Number>
Number combine(Number a, Number b, int reduction) {
  switch (reduction) {
    case kProduct: return static_cast<Number>(a * b);
    case kMax: return std::max(a, b);
    case kMin: return std::min(a, b);
    default: return static_cast<Number>(a + b);
  }
}

template <typename Number>
void reduce_as(const std::vector<const char*>& parts, std::size_t count, int reduction, void* out) {
  auto* to = static_cast<Number*>(out);
  for (std::size_t i = 0; i < count; ++i) {
    Number value = reinterpret_cast<const Number*>(parts[0])[i];
    for (std::size_t part = 1; part < parts.size(); ++part)
      value = combine(value, reinterpret_cast<const Number*>(parts[part])[i], reduction);
    to[i] = reduction == kAverage ? static_cast<Number>(value / static_cast<Number>(parts.size())) : value;
  }
}

template <typename Short>
void reduce_short(const std::vector<const char*>& parts, std::size_t count, int reduction, void* out) {
  auto* to = static_cast<Short*>(out);
  for (std::size_t i = 0; i < count; ++i) {
    float value = reinterpret_cast<const Short*>(parts[0])[i];
    for (std::size_t part = 1; part < parts.size(); ++part)
      value = combine<float>(value, reinterpret_cast<const Short*>(parts[part])[i], reduction);
    to[i] = Short::of(reduction == kAverage ? value / static_cast<float>(parts.size()) : value);
  }
}

template <typename Number>
void scale_as(void* data, std::size_t count, double factor) {
  for (auto* one = static_cast<Number*>(data); count > 0; --count, ++one)
    *one = static_cast<Number>(static_cast<double>(*one) * factor);
}
template <typename Short>
void scale_short(void* data, std::size_t count, double factor) {
  for (auto* one = static_cast<Short*>(data); count > 0; --count, ++one)
    *one = Short::of(static_cast<float>(*one) * static_cast<float>(factor));
}

}  // namespace

std::size_t width_of(int type) {
  static const std::size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return type < 0 || type > 11 ? 0 : widths[type];
}

void reduce(const std::vector<const char*>& parts, std::size_t count, int type, int reduction, void* out) {
  if (reduction > kAverage) reduction = kSum;  // each rank has multiplied its own
  switch (type) {
    case 0: return reduce_as<std::int8_t>(parts, count, reduction, out);
    case 1: return reduce_as<std::uint8_t>(parts, count, reduction, out);
    case 2: return reduce_as<std::int32_t>(parts, count, reduction, out);
    case 3: return reduce_as<std::uint32_t>(parts, count, reduction, out);
    case 4: return reduce_as<std::int64_t>(parts, count, reduction, out);
    case 5: return reduce_as<std::uint64_t>(parts, count, reduction, out);
    case 6: return reduce_short<Half>(parts, count, reduction, out);
    case 7: return reduce_as<float>(parts, count, reduction, out);
    case 8: return reduce_as<double>(parts, count, reduction, out);
    case 9: return reduce_short<Bfloat>(parts, count, reduction, out);
    default: std::memcpy(out, parts[0], count * width_of(type));  // 8-bit floats are carried, not added up
  }
}

double value_of(const void* one, int type) {
  switch (type) {
    case 6: return static_cast<const Half*>(one)->operator float();
    case 7: return *static_cast<const float*>(one);
    case 8: return *static_cast<const double*>(one);
    case 9: return static_cast<const Bfloat*>(one)->operator float();
    default: return 1;
  }
}

void scale(void* data, std::size_t count, int type, double factor) {
  if (type == 6) return scale_short<Half>(data, count, factor);
  if (type == 7) return scale_as<float>(data, count, factor);
  if (type == 8) return scale_as<double>(data, count, factor);
  if (type == 9) return scale_short<Bfloat>(data, count, factor);
}

}  // namespace stand_in
