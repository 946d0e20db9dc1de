// gather_kv: rows of sequences out of their blocks, packed, rows that are nowhere as zeros.
//
// Bytes that must move: num_tokens * H * D * (read + written). 16 bytes per access; where a row lies is found once, by
// one thread, for all the threads that copy it.
#include <torch/csrc/stable/library.h>

#include "cuda.h"
#include "rows.h"
#include "words.cuh"

namespace pagedattn {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 4;  // rows per thread

struct Table {
  const int32_t* block;  // [num_seqs, columns]
  int64_t row, column;   // strides
  int num_seqs, columns;
  const int32_t* ends;    // [num_seqs + 1]
  const int32_t* starts;  // [num_seqs] or null
};

// Blocks [P, S, H, D]; strides, and per_head, in words.
struct Cache {
  const void* data;
  int64_t block, slot, head;
  int64_t num_blocks, block_size;
  int columns, per_head;
};

// Where row `row` of the result lies in the cache, in words; -1 where it is nowhere.
__device__ int64_t place_of(int64_t row, const Table& table, const Cache& cache) {
  int low = 0, high = table.num_seqs;  // the first sequence that ends after the row
  while (low < high) {
    const int middle = (low + high) / 2;
    if (table.ends[middle + 1] > row)
      high = middle;
    else
      low = middle + 1;
  }
  if (low == table.num_seqs) return -1;
  const int64_t position = row - table.ends[low] + (table.starts ? table.starts[low] : 0);
  const int64_t column = position / cache.block_size;
  if (position < 0 || column >= table.columns) return -1;
  const int64_t block = table.block[low * table.row + column * table.column];
  if (block < 0 || block >= cache.num_blocks) return -1;
  return block * cache.block + position % cache.block_size * cache.slot;
}

// Threads x: columns of a row, y: rows.
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    gather_rows(const Cache cache, const Table table, Word* out, const int64_t num_rows) {
  __shared__ int64_t place[kThreads * kTokens];
  const int rows = blockDim.y * kTokens;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * rows;
  for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < rows; i += blockDim.x * blockDim.y)
    place[i] = first + i < num_rows ? place_of(first + i, table, cache) : -1;
  __syncthreads();
  const int column = blockIdx.y * blockDim.x + threadIdx.x;
  if (column >= cache.columns) return;
  const int head = column / cache.per_head, within = column % cache.per_head;
  const auto* from = static_cast<const Word*>(cache.data) + head * cache.head + within;
  Word word[kTokens];
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int64_t at = place[threadIdx.y + i * blockDim.y];
    word[i] = at < 0 ? Word{} : load(from + at);
  }
#pragma unroll
  for (int i = 0; i < kTokens; ++i) {
    const int64_t row = first + threadIdx.y + i * blockDim.y;
    if (row < num_rows) store(out + row * cache.columns + column, word[i]);
  }
}

template <int BYTES>
void launch(Cache cache, const Table& table, const Tensor& out, int64_t size, cudaStream_t stream) {
  using Word = typename WordOf<BYTES>::type;
  for (int64_t* stride : {&cache.block, &cache.slot, &cache.head}) *stride = *stride * size / BYTES;
  cache.columns = static_cast<int>(cache.columns * size / BYTES);
  cache.per_head = static_cast<int>(cache.per_head * size / BYTES);
  const int chunks = (cache.columns + kThreads - 1) / kThreads;
  const int width = (cache.columns + chunks - 1) / chunks, rows = kThreads / width;
  const int64_t num_rows = out.sizes()[0];
  const dim3 grid(static_cast<unsigned>((num_rows + rows * kTokens - 1) / (rows * kTokens)), chunks);
  gather_rows<Word><<<grid, dim3(width, rows), 0, stream>>>(
      cache, table, static_cast<Word*>(out.mutable_data_ptr()), num_rows);
  cuda_check(cudaGetLastError(), "gather_kv");
}

void gather_kv(
    const Tensor& cache, const Tensor& block_table, const Tensor& cu_lens, const std::optional<Tensor>& starts,
    const Tensor& out) {
  const int32_t device = cache.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  if (out.numel() == 0) return;
  const auto sizes = cache.sizes();
  const auto size = static_cast<int64_t>(cache.element_size());
  const Table table{
      static_cast<const int32_t*>(block_table.const_data_ptr()), block_table.stride(0), block_table.stride(1),
      sizes[1] > 0 ? static_cast<int>(block_table.sizes()[0]) : 0,  // no row is anywhere in blocks of no slots
      static_cast<int>(block_table.sizes()[1]),
      static_cast<const int32_t*>(cu_lens.const_data_ptr()),
      starts ? static_cast<const int32_t*>(starts->const_data_ptr()) : nullptr};
  const Cache from{
      cache.const_data_ptr(), step(cache, 0), step(cache, 1), step(cache, 2), sizes[0], sizes[1],
      static_cast<int>(sizes[2] * sizes[3]), static_cast<int>(sizes[3])};
  Alignment all;
  all.add(from.data).add(out.const_data_ptr()).add(from.per_head * size);
  for (const int64_t stride : {from.block, from.slot, from.head}) all.add(stride * size);
  const cudaStream_t stream = current_stream(device);
  switch (all.widest(16)) {
    case 16: return launch<16>(from, table, out, size, stream);
    case 8: return launch<8>(from, table, out, size, stream);
    case 4: return launch<4>(from, table, out, size, stream);
    case 2: return launch<2>(from, table, out, size, stream);
    default: return launch<1>(from, table, out, size, stream);
  }
}

}  // namespace
}  // namespace pagedattn

STABLE_TORCH_LIBRARY_IMPL(pagedattn_csrc, CUDA, m) { m.impl("gather_kv", TORCH_BOX(&pagedattn::gather_kv)); }
