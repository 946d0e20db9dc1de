// reshape_and_cache_classic: keys [P, H, D / x, S, x] and values [P, H, D, S], an element at a time.
//
// A layout for exchange, not for speed: neighbours in a value row lie S elements apart, so that its stores cannot be
// wide. One thread block per token.
#include <torch/csrc/stable/library.h>

#include "cuda.h"
#include "rows.h"
#include "words.cuh"

namespace pagedattn {
namespace {

constexpr int kThreads = 256;

struct Strides {
  int64_t token, head;
};

template <typename Word>
__global__ void __launch_bounds__(kThreads) write_classic(
    const Word* key, const Word* value, Word* key_cache, Word* value_cache, const Slots slots, const Strides key_step,
    const Strides value_step, const int heads, const int dim, const int group) {
  const int64_t token = blockIdx.x, slot = slots.slot[token];
  if (slot < 0 || slot >= slots.count) return;
  const int64_t block = slot / slots.block_size, offset = slot % slots.block_size;
  for (int i = threadIdx.x; i < heads * dim; i += kThreads) {
    const int head = i / dim, d = i % dim;
    const int64_t row = (block * heads + head) * dim;  // in units of S elements
    key_cache[(row + d / group * group) * slots.block_size + offset * group + d % group] =
        key[token * key_step.token + head * key_step.head + d];
    value_cache[(row + d) * slots.block_size + offset] = value[token * value_step.token + head * value_step.head + d];
  }
}

template <int BYTES>
void launch(
    const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache, const Slots& slots,
    cudaStream_t stream) {
  using Word = typename WordOf<BYTES>::type;
  write_classic<Word><<<static_cast<unsigned>(slots.tokens), kThreads, 0, stream>>>(
      static_cast<const Word*>(key.const_data_ptr()), static_cast<const Word*>(value.const_data_ptr()),
      static_cast<Word*>(key_cache.mutable_data_ptr()), static_cast<Word*>(value_cache.mutable_data_ptr()), slots,
      Strides{key.stride(0), key.stride(1)}, Strides{value.stride(0), value.stride(1)},
      static_cast<int>(value_cache.sizes()[1]), static_cast<int>(value_cache.sizes()[2]),
      static_cast<int>(key_cache.sizes()[4]));
  cuda_check(cudaGetLastError(), "reshape_and_cache_classic");
}

void reshape_and_cache_classic(
    const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
    const Tensor& slot_mapping) {
  const int32_t device = key_cache.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const int64_t size = value_cache.sizes()[3];
  const auto* slot = static_cast<const int64_t*>(slot_mapping.const_data_ptr());
  const Slots slots{slot, slot_mapping.numel(), value_cache.sizes()[0] * size, size};
  const cudaStream_t stream = current_stream(device);
  switch (key.element_size()) {
    case 1: return launch<1>(key, value, key_cache, value_cache, slots, stream);
    case 2: return launch<2>(key, value, key_cache, value_cache, slots, stream);
    case 4: return launch<4>(key, value, key_cache, value_cache, slots, stream);
    default: return launch<8>(key, value, key_cache, value_cache, slots, stream);
  }
}

}  // namespace
}  // namespace pagedattn

STABLE_TORCH_LIBRARY_IMPL(pagedattn_csrc, CUDA, m) {
  m.impl("reshape_and_cache_classic", TORCH_BOX(&pagedattn::reshape_and_cache_classic));
}
