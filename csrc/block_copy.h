// Copies of whole blocks by (source, target) pairs: the plan, made on the host, and the kernel that carries it out.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace pagedattn {

using torch::stable::Tensor;

struct Pair {
  uint32_t source, target;
};

// The blocks of one tensor and those of the tensor that they are copied to.
struct Blocks {
  const char* source;
  char* target;
  int64_t source_step, target_step;  // bytes from one block to the next
  int64_t bytes;                     // of one block
};

inline Blocks blocks_of(const Tensor& source, const Tensor& target) {
  const auto size = static_cast<int64_t>(source.element_size());
  int64_t elements = 1;
  for (int64_t dim = 1; dim < source.dim(); ++dim) elements *= source.sizes()[dim];
  return {
      static_cast<const char*>(source.const_data_ptr()),
      static_cast<char*>(target.mutable_data_ptr()),
      source.stride(0) * size,
      target.stride(0) * size,
      elements * size};
}

// Pairs [n, 2] int64 of the host, checked: every block inside its tensor, no target twice.
inline std::vector<Pair> read_pairs(const Tensor& pairs, int64_t num_sources, int64_t num_targets) {
  STD_TORCH_CHECK(num_sources <= INT64_C(1) << 32 && num_targets <= INT64_C(1) << 32, "more than 2^32 blocks");
  const auto* entry = static_cast<const int64_t*>(pairs.const_data_ptr());
  const int64_t row = pairs.stride(0), column = pairs.stride(1);
  std::vector<bool> written(num_targets);
  std::vector<Pair> out(pairs.sizes()[0]);
  for (size_t i = 0; i < out.size(); ++i, entry += row) {
    const int64_t source = entry[0], target = entry[column];
    STD_TORCH_CHECK(source >= 0 && source < num_sources, "source block ", source, " is not in [0, ", num_sources, ")");
    STD_TORCH_CHECK(target >= 0 && target < num_targets, "target block ", target, " is not in [0, ", num_targets, ")");
    STD_TORCH_CHECK(!written[target], "target block ", target, " occurs twice");
    written[target] = true;
    out[i] = {static_cast<uint32_t>(source), static_cast<uint32_t>(target)};
  }
  return out;
}

// Copies every pair of one tensor within the host's memory.
inline void copy_on_host(const Blocks& blocks, const std::vector<Pair>& pairs) {
  for (const Pair pair : pairs)
    std::memcpy(
        blocks.target + pair.target * blocks.target_step,
        blocks.source + pair.source * blocks.source_step,
        blocks.bytes);
}

#ifdef USE_CUDA
// Enqueues every pair in every tensor, in no order among them. `width` limits the thread blocks at work; 0 does not.
void copy_pairs(const std::vector<Blocks>& blocks, const std::vector<Pair>& pairs, int width, void* stream);

bool kernels_run_on(int32_t device);
#endif

}  // namespace pagedattn
