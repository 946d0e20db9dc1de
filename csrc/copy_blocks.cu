// copy_blocks on a GPU, and the kernel that swap_blocks shares: whole blocks by pairs, all tensors in one launch.
//
// Bytes that must move: pairs * tensors * block bytes, read once and written once. 0.5 GB copied is 1.07 GB moved: on
// an H200 (4285 GB/s) not below 250 us. Between host and device the bus is the floor (about 55 GB/s).
//
// The tensors and the pairs travel as kernel parameters: no transfer to wait for, and a captured graph holds them.
// Lists too long for that are cut into several launches, each with much more to copy than a launch costs. The copies of
// one launch are in no order: the caller keeps sources and targets apart (see pagedattn/ops/copy_blocks.py).
#include <cuda_runtime.h>
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "block_copy.h"
#include "cuda.h"
#include "words.cuh"

namespace pagedattn {
namespace {

constexpr int kThreads = 256;
constexpr int kLoads = 4;      // in flight per thread
constexpr int kTensors = 80;   // per launch
constexpr int kFewPairs = 108;  // parameters of at most 4 KB
#if CUDART_VERSION >= 12010
constexpr int kManyPairs = 3680;  // of at most 32764 bytes, which CUDA 12.1 and sm_70 brought
#else
constexpr int kManyPairs = kFewPairs;
#endif

template <int PAIRS>
struct Plan {
  int tensors, pairs, chunks;
  Blocks blocks[kTensors];
  Pair pair[PAIRS];
};
static_assert(sizeof(Plan<kFewPairs>) <= 4096 && sizeof(Plan<kManyPairs>) <= 32764);

// A chunk is what one thread block moves at a time: kThreads * kLoads words of one block of one tensor.
template <typename Word, int PAIRS>
__global__ void __launch_bounds__(kThreads) copy_chunks(const __grid_constant__ Plan<PAIRS> plan) {
  const unsigned items = static_cast<unsigned>(plan.tensors) * plan.pairs * plan.chunks;
  for (unsigned item = blockIdx.x; item < items; item += gridDim.x) {
    const unsigned chunk = item % plan.chunks, rest = item / plan.chunks;
    const Pair pair = plan.pair[rest % plan.pairs];
    const Blocks& blocks = plan.blocks[rest / plan.pairs];
    const auto* from = reinterpret_cast<const Word*>(blocks.source + pair.source * blocks.source_step);
    auto* to = reinterpret_cast<Word*>(blocks.target + pair.target * blocks.target_step);
    const int64_t words = blocks.bytes / static_cast<int64_t>(sizeof(Word));
    const int64_t first = static_cast<int64_t>(chunk) * (kThreads * kLoads) + threadIdx.x;
    Word word[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (first + i * kThreads < words) word[i] = load(from + first + i * kThreads);
#pragma unroll
    for (int i = 0; i < kLoads; ++i)
      if (first + i * kThreads < words) store(to + first + i * kThreads, word[i]);
  }
}

template <typename Word, int PAIRS>
void launch(
    const Blocks* blocks, size_t tensors, const Pair* pairs, size_t count, int64_t chunks, int width,
    cudaStream_t stream) {
  Plan<PAIRS> plan{static_cast<int>(tensors), static_cast<int>(count), static_cast<int>(chunks), {}, {}};
  std::copy_n(blocks, tensors, plan.blocks);
  std::copy_n(pairs, count, plan.pair);
  int64_t grid = static_cast<int64_t>(tensors) * static_cast<int64_t>(count) * chunks;
  if (width) grid = std::min<int64_t>(grid, width);
  copy_chunks<Word, PAIRS><<<static_cast<unsigned>(grid), kThreads, 0, stream>>>(plan);
  cuda_check(cudaGetLastError(), "copy of blocks");
}

template <typename Word>
void copy_all(const std::vector<Blocks>& blocks, const std::vector<Pair>& pairs, int width, cudaStream_t stream) {
  int64_t longest = 0;
  for (const Blocks& one : blocks) longest = std::max(longest, one.bytes);
  constexpr int64_t kChunk = kThreads * kLoads * sizeof(Word);
  const int64_t chunks = (longest + kChunk - 1) / kChunk;
  if (chunks == 0) return;
  STD_TORCH_CHECK(chunks < (1 << 23), "a block of ", longest, " bytes is too large");
  // The number of items must stay within 31 bits.
  const size_t most = std::clamp<int64_t>((INT64_C(1) << 31) / (kTensors * chunks), 1, kManyPairs);
  for (size_t tensor = 0; tensor < blocks.size(); tensor += kTensors) {
    const size_t tensors = std::min<size_t>(kTensors, blocks.size() - tensor);
    for (size_t pair = 0; pair < pairs.size(); pair += most) {
      const size_t count = std::min(most, pairs.size() - pair);
      const auto run = count <= kFewPairs ? launch<Word, kFewPairs> : launch<Word, kManyPairs>;
      run(&blocks[tensor], tensors, &pairs[pair], count, chunks, width, stream);
    }
  }
}

}  // namespace

void copy_pairs(const std::vector<Blocks>& blocks, const std::vector<Pair>& pairs, int width, void* stream) {
  uint64_t bits = 16;
  for (const Blocks& one : blocks)
    bits |= reinterpret_cast<uintptr_t>(one.source) | reinterpret_cast<uintptr_t>(one.target) | one.source_step |
        one.target_step | one.bytes;
  const auto at = static_cast<cudaStream_t>(stream);
  if (bits % 16 == 0) return copy_all<uint4>(blocks, pairs, width, at);
  if (bits % 4 == 0) return copy_all<uint32_t>(blocks, pairs, width, at);
  copy_all<unsigned char>(blocks, pairs, width, at);
}

bool kernels_run_on(int32_t device) {
  const torch::stable::accelerator::DeviceGuard guard(device);
  cudaFuncAttributes attributes;
  const bool there = cudaFuncGetAttributes(&attributes, copy_chunks<uint4, kFewPairs>) == cudaSuccess;
  cudaGetLastError();
  return there;
}

namespace {

void copy_blocks(const std::vector<Tensor>& sources, const std::vector<Tensor>& targets, const Tensor& pairs) {
  STD_TORCH_CHECK(sources.size() == targets.size() && !sources.empty(), "one target per source, and at least one");
  const auto checked = read_pairs(pairs, sources[0].sizes()[0], targets[0].sizes()[0]);
  std::vector<Blocks> blocks;
  for (size_t i = 0; i < sources.size(); ++i) blocks.push_back(blocks_of(sources[i], targets[i]));
  const int32_t device = sources[0].get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  copy_pairs(blocks, checked, 0, current_stream(device));
}

}  // namespace
}  // namespace pagedattn

STABLE_TORCH_LIBRARY_IMPL(pagedattn_csrc, CUDA, m) { m.impl("copy_blocks", TORCH_BOX(&pagedattn::copy_blocks)); }
