// reshape_and_cache on the CPU: the same writes as the kernel's, one row after the other.
#include <torch/csrc/stable/library.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Float8_e4m3fn.h>
#include <torch/headeronly/util/Float8_e5m2.h>
#include <torch/headeronly/util/Half.h>

#include <cstring>

#include "../rows.h"

namespace pagedattn {
namespace {

// Calls write(token, head, block offset in cache elements) for every live row.
template <typename Write>
void for_each_row(const Side& side, const Slots& slots, Write write) {
  for (int64_t token = 0; token < slots.tokens; ++token) {
    const int64_t slot = slots.slot[token];
    if (slot < 0 || slot >= slots.count) continue;
    const int64_t at = slot / slots.block_size * side.cache_block + slot % slots.block_size * side.cache_slot;
    for (int head = 0; head < side.heads; ++head)
      write(token * side.row_token + head * side.row_head, at + head * side.cache_head, head);
  }
}

void copy_side(const Side& side, const Slots& slots, int64_t size) {
  const auto* rows = static_cast<const char*>(side.rows);
  auto* cache = static_cast<char*>(side.cache);
  for_each_row(side, slots, [&](int64_t from, int64_t to, int) {
    std::memcpy(cache + to * size, rows + from * size, side.dim * size);
  });
}

// NaN stays NaN: it compares as neither above nor below.
template <typename Fp8>
Fp8 saturate(float value, float most) {
  return Fp8(value > most ? most : value < -most ? -most : value);
}

template <typename Source, typename Fp8>
void quantise_side(const Side& side, const Slots& slots, float most) {
  const auto* rows = static_cast<const Source*>(side.rows);
  auto* cache = static_cast<Fp8*>(side.cache);
  for_each_row(side, slots, [&](int64_t from, int64_t to, int head) {
    const float scale = side.scale ? side.scale[head * side.scale_step] : side.scale_value;
    for (int i = 0; i < side.dim; ++i)
      cache[to + i] = saturate<Fp8>(static_cast<float>(rows[from + i]) / scale, most);
  });
}

template <typename Source>
void quantise(const Side& side, const Slots& slots, ScalarType stored) {
  if (stored == ScalarType::Float8_e4m3fn)
    quantise_side<Source, c10::Float8_e4m3fn>(side, slots, 448.0f);
  else
    quantise_side<Source, c10::Float8_e5m2>(side, slots, 57344.0f);
}

void write(
    const Tensor& rows,
    const Tensor& cache,
    const Tensor& slot_mapping,
    const std::optional<Tensor>& scale,
    double scale_value) {
  const Side side = side_of(rows, cache, scale, scale_value);
  const Slots slots = slots_of(slot_mapping, cache);
  const ScalarType given = rows.scalar_type(), stored = cache.scalar_type();
  if (given == stored) return copy_side(side, slots, static_cast<int64_t>(cache.element_size()));
  STD_TORCH_CHECK(is_fp8(stored), "rows and cache differ in dtype, and the cache is not fp8");
  if (given == ScalarType::Half) return quantise<c10::Half>(side, slots, stored);
  if (given == ScalarType::BFloat16) return quantise<c10::BFloat16>(side, slots, stored);
  STD_TORCH_CHECK(given == ScalarType::Float, "rows of an fp8 cache must be float16, bfloat16 or float32");
  quantise<float>(side, slots, stored);
}

void reshape_and_cache(
    const Tensor& key,
    const std::optional<Tensor>& value,
    const Tensor& key_cache,
    const std::optional<Tensor>& value_cache,
    const Tensor& slot_mapping,
    const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale,
    double k_scale_value,
    double v_scale_value) {
  write(key, key_cache, slot_mapping, k_scale, k_scale_value);
  if (value && value_cache) write(*value, *value_cache, slot_mapping, v_scale, v_scale_value);
}

}  // namespace
}  // namespace pagedattn

STABLE_TORCH_LIBRARY_IMPL(pagedattn_csrc, CPU, m) {
  m.impl("reshape_and_cache", TORCH_BOX(&pagedattn::reshape_and_cache));
}
