// reshape_and_cache_classic on the CPU: keys [P, H, D / x, S, x] and values [P, H, D, S].
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "../rows.h"

namespace pagedattn {
namespace {

void reshape_and_cache_classic(
    const Tensor& key,
    const Tensor& value,
    const Tensor& key_cache,
    const Tensor& value_cache,
    const Tensor& slot_mapping) {
  const auto size = static_cast<int64_t>(key.element_size());
  const int64_t heads = value_cache.sizes()[1], dim = value_cache.sizes()[2], block_size = value_cache.sizes()[3];
  const int64_t group = key_cache.sizes()[4], count = value_cache.sizes()[0] * block_size;
  const auto* slots = static_cast<const int64_t*>(slot_mapping.const_data_ptr());
  const auto *keys = static_cast<const char*>(key.const_data_ptr()),
             *values = static_cast<const char*>(value.const_data_ptr());
  auto *to_keys = static_cast<char*>(key_cache.mutable_data_ptr()),
       *to_values = static_cast<char*>(value_cache.mutable_data_ptr());
  for (int64_t token = 0; token < slot_mapping.numel(); ++token) {
    if (slots[token] < 0 || slots[token] >= count) continue;
    const int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t d = 0; d < dim; ++d) {
        const int64_t to_key = ((block * heads + head) * dim + d / group * group) * block_size + offset * group;
        const int64_t to_value = ((block * heads + head) * dim + d) * block_size + offset;
        const int64_t from_key = token * key.stride(0) + head * key.stride(1) + d;
        const int64_t from_value = token * value.stride(0) + head * value.stride(1) + d;
        std::memcpy(to_keys + (to_key + d % group) * size, keys + from_key * size, size);
        std::memcpy(to_values + to_value * size, values + from_value * size, size);
      }
  }
}

}  // namespace
}  // namespace pagedattn

STABLE_TORCH_LIBRARY_IMPL(pagedattn_csrc, CPU, m) {
  m.impl("reshape_and_cache_classic", TORCH_BOX(&pagedattn::reshape_and_cache_classic));
}
