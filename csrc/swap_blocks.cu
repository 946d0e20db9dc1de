// swap_blocks: blocks between a GPU and the host, or between two tensors of one GPU, in stream order.
//
// Bytes that must move: pairs * block bytes over the bus, about 55 GB/s one way on PCIe 5 x16: 1 GB not below 19 ms. A
// cudaMemcpyAsync per block of 32 KB (0.6 us of bus time) costs more to enqueue than to carry out, so there are three
// ways, all for pinned memory (and within one GPU always the first):
//   kKernel  a few SMs read or write the host's memory directly, 16 bytes per access; no cost per block
//   kBatch   one cudaMemcpyBatchAsync (CUDA 12.8) of the merged runs, by the copy engines
//   kCopies  one cudaMemcpyAsync per merged run, by the copy engines
// Pageable memory is always copied by kCopies, and waited for.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "block_copy.h"
#include "cuda.h"

namespace pagedattn {
namespace {

enum Mechanism : int64_t { kBest = 0, kKernel = 1, kBatch = 2, kCopies = 3 };
constexpr int kBusBlocks = 32;                    // thread blocks that fill the bus: 16 KB in flight each
constexpr int64_t kEngineBytes = INT64_C(1) << 20;  // mean run from which kBest leaves the SMs alone

struct Run {
  const char* source;
  char* target;
  size_t bytes;
};

// Neighbours that stay neighbours become one run; in the sources' order, since the pairs' own means nothing.
std::vector<Run> merged(const Blocks& blocks, std::vector<Pair> pairs) {
  const bool dense = blocks.source_step == blocks.bytes && blocks.target_step == blocks.bytes;
  if (dense) std::sort(pairs.begin(), pairs.end(), [](const Pair& a, const Pair& b) { return a.source < b.source; });
  std::vector<Run> runs;
  for (const Pair& pair : pairs) {
    const char* source = blocks.source + pair.source * blocks.source_step;
    char* target = blocks.target + pair.target * blocks.target_step;
    if (dense && !runs.empty() && runs.back().source + runs.back().bytes == source &&
        runs.back().target + runs.back().bytes == target)
      runs.back().bytes += blocks.bytes;
    else
      runs.push_back({source, target, static_cast<size_t>(blocks.bytes)});
  }
  return runs;
}

void copy_runs(const std::vector<Run>& runs, cudaStream_t stream) {
  for (const Run& run : runs)
    cuda_check(cudaMemcpyAsync(run.target, run.source, run.bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
}

// False where this CUDA has no such call or refuses it: nothing is enqueued then.
bool copy_batch([[maybe_unused]] const std::vector<Run>& runs, [[maybe_unused]] cudaStream_t stream) {
#if CUDART_VERSION >= 12080
  cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
  // The legacy default stream is refused, and a batch cannot be captured.
  if (stream == nullptr || stream == cudaStreamLegacy) return false;
  cuda_check(cudaStreamIsCapturing(stream, &capturing), "cudaStreamIsCapturing");
  if (capturing != cudaStreamCaptureStatusNone) return false;
  std::vector<const void*> sources;
  std::vector<void*> targets;
  std::vector<size_t> bytes;
  for (const Run& run : runs) {
    sources.push_back(run.source);
    targets.push_back(run.target);
    bytes.push_back(run.bytes);
  }
  cudaMemcpyAttributes attributes{};
  // In stream order on both ways: a source may be what an earlier kernel or swap of this stream is still writing.
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  size_t first = 0;
#if CUDART_VERSION >= 13000
  const cudaError_t error = cudaMemcpyBatchAsync(
      targets.data(), sources.data(), bytes.data(), runs.size(), &attributes, &first, 1, stream);
#else
  size_t failed = 0;
  const cudaError_t error = cudaMemcpyBatchAsync(
      targets.data(), const_cast<void**>(sources.data()), bytes.data(), runs.size(), &attributes, &first, 1, &failed,
      stream);
#endif
  if (error == cudaSuccess) return true;
  cudaGetLastError();
  STD_TORCH_CHECK(
      error == cudaErrorNotSupported || error == cudaErrorInvalidValue || error == cudaErrorCallRequiresNewerDriver,
      "cudaMemcpyBatchAsync: ", cudaGetErrorString(error));
#endif
  return false;
}

// The address by which the GPU reaches the tensor's memory; null for pageable memory.
void* gpu_address(const Tensor& tensor) {
  if (tensor.is_cuda()) return tensor.mutable_data_ptr();
  const auto last = (tensor.sizes()[0] - 1) * tensor.stride(0) * static_cast<int64_t>(tensor.element_size());
  cudaPointerAttributes start{}, end{};
  auto* data = static_cast<char*>(tensor.mutable_data_ptr());
  cuda_check(cudaPointerGetAttributes(&start, data), "cudaPointerGetAttributes");
  cuda_check(cudaPointerGetAttributes(&end, data + last), "cudaPointerGetAttributes");
  const bool pinned = start.type == cudaMemoryTypeHost && end.type == cudaMemoryTypeHost;
  return pinned ? start.devicePointer : nullptr;
}

void swap_blocks(const Tensor& source, const Tensor& target, const Tensor& pairs, int64_t mechanism) {
  const auto checked = read_pairs(pairs, source.sizes()[0], target.sizes()[0]);
  const int32_t device = (source.is_cuda() ? source : target).get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  const Blocks blocks = blocks_of(source, target);
  const auto* from = static_cast<const char*>(gpu_address(source));
  auto* to = static_cast<char*>(gpu_address(target));
  const bool over_bus = !source.is_cuda() || !target.is_cuda();
  if (over_bus && (from == nullptr || to == nullptr)) {
    copy_runs(merged(blocks, checked), stream);
    return cuda_check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  }
  std::vector<Run> runs;
  if (over_bus && mechanism != kKernel) runs = merged(blocks, checked);
  if (mechanism == kBest) {
    const auto number = static_cast<int64_t>(runs.size());
    const bool engines = over_bus && static_cast<int64_t>(checked.size()) * blocks.bytes >= number * kEngineBytes;
    mechanism = engines ? kBatch : kKernel;
  }
  if (mechanism == kKernel || !over_bus) {
    Blocks reachable = blocks;
    reachable.source = from;
    reachable.target = to;
    return copy_pairs({reachable}, checked, over_bus ? kBusBlocks : 0, stream);
  }
  if (mechanism == kCopies || !copy_batch(runs, stream)) copy_runs(runs, stream);
}

}  // namespace
}  // namespace pagedattn

STABLE_TORCH_LIBRARY_IMPL(pagedattn_csrc, CUDA, m) { m.impl("swap_blocks", TORCH_BOX(&pagedattn::swap_blocks)); }
