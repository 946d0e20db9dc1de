// reshape_and_cache_classic on the CPU: keys [P, H, D / x, S, x] and values [P, H, D, S].
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "../rows.h"

namespace pagedattn {
namespace {

constexpr int64_t kPiece = 16;  // bytes of a key that lie side by side

template <typename Word>
void write_rows(
    const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache, const Slots& slots) {
  constexpr int64_t kGroup = kPiece / sizeof(Word);
  const int64_t heads = value_cache.sizes()[1], dim = value_cache.sizes()[2];
  STD_TORCH_CHECK(key_cache.sizes()[4] == kGroup && dim % kGroup == 0, "keys must lie in pieces of 16 bytes");
  const auto *keys = static_cast<const Word*>(key.const_data_ptr()),
             *values = static_cast<const Word*>(value.const_data_ptr());
  auto *to_keys = static_cast<Word*>(key_cache.mutable_data_ptr()),
       *to_values = static_cast<Word*>(value_cache.mutable_data_ptr());
  for (int64_t token = 0; token < slots.tokens; ++token) {
    const int64_t slot = slots.slot[token];
    if (slot < 0 || slot >= slots.count) continue;
    const int64_t block = slot / slots.block_size, offset = slot % slots.block_size;
    for (int64_t head = 0; head < heads; ++head) {
      const int64_t at = (block * heads + head) * dim * slots.block_size;
      const Word* from_key = keys + token * key.stride(0) + head * key.stride(1);
      const Word* from_value = values + token * value.stride(0) + head * value.stride(1);
      for (int64_t d = 0; d < dim; d += kGroup)
        std::memcpy(to_keys + at + d * slots.block_size + offset * kGroup, from_key + d, kPiece);
      for (int64_t d = 0; d < dim; ++d) to_values[at + d * slots.block_size + offset] = from_value[d];
    }
  }
}

void reshape_and_cache_classic(
    const Tensor& key,
    const Tensor& value,
    const Tensor& key_cache,
    const Tensor& value_cache,
    const Tensor& slot_mapping) {
  const int64_t size = value_cache.sizes()[3];
  const auto* slot = static_cast<const int64_t*>(slot_mapping.const_data_ptr());
  const Slots slots{slot, slot_mapping.numel(), value_cache.sizes()[0] * size, size};
  switch (key.element_size()) {
    case 1: return write_rows<uint8_t>(key, value, key_cache, value_cache, slots);
    case 2: return write_rows<uint16_t>(key, value, key_cache, value_cache, slots);
    case 4: return write_rows<uint32_t>(key, value, key_cache, value_cache, slots);
    default: return write_rows<uint64_t>(key, value, key_cache, value_cache, slots);
  }
}

}  // namespace
}  // namespace pagedattn

STABLE_TORCH_LIBRARY_IMPL(pagedattn_csrc, CPU, m) {
  m.impl("reshape_and_cache_classic", TORCH_BOX(&pagedattn::reshape_and_cache_classic));
}
