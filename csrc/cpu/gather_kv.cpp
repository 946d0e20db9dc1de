// gather_kv on the CPU.
#include <torch/csrc/stable/library.h>

#include <cstring>

#include "../rows.h"

namespace pagedattn {
namespace {

void gather_kv(
    const Tensor& cache,
    const Tensor& block_table,
    const Tensor& cu_lens,
    const std::optional<Tensor>& starts,
    const Tensor& out) {
  const auto size = static_cast<int64_t>(cache.element_size());
  const int64_t num_blocks = cache.sizes()[0], block_size = cache.sizes()[1], heads = cache.sizes()[2];
  const int64_t head_bytes = cache.sizes()[3] * size, num_seqs = block_table.sizes()[0];
  const auto* table = static_cast<const int32_t*>(block_table.const_data_ptr());
  const auto* ends = static_cast<const int32_t*>(cu_lens.const_data_ptr());
  const auto* first = starts ? static_cast<const int32_t*>(starts->const_data_ptr()) : nullptr;
  const auto* from = static_cast<const char*>(cache.const_data_ptr());
  auto* to = static_cast<char*>(out.mutable_data_ptr());
  int64_t seq = block_size > 0 ? 0 : num_seqs;  // no row is anywhere in blocks of no slots
  for (int64_t row = 0; row < out.sizes()[0]; ++row, to += heads * head_bytes) {
    while (seq < num_seqs && row >= ends[seq + 1]) ++seq;
    const int64_t position = seq < num_seqs ? row - ends[seq] + (first ? first[seq] : 0) : -1;
    const int64_t column = position / block_size;
    int64_t block = -1;
    if (position >= 0 && column < block_table.sizes()[1])
      block = table[seq * block_table.stride(0) + column * block_table.stride(1)];
    if (block < 0 || block >= num_blocks) {
      std::memset(to, 0, heads * head_bytes);
      continue;
    }
    const int64_t at = block * cache.stride(0) + position % block_size * cache.stride(1);
    for (int64_t head = 0; head < heads; ++head)
      std::memcpy(to + head * head_bytes, from + (at + head * cache.stride(2)) * size, head_bytes);
  }
}

}  // namespace
}  // namespace pagedattn

STABLE_TORCH_LIBRARY_IMPL(pagedattn_csrc, CPU, m) { m.impl("gather_kv", TORCH_BOX(&pagedattn::gather_kv)); }
