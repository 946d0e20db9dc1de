// Attention of one query row for each of many sequences, over a paged cache, on the CPU.
//
// Keys and values are read once and where they lie: gathering them for torch takes longer than attending to them.
// False, and nothing is written, where a sequence's block is outside the cache.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "../rows.h"

// One function for each generation of CPUs, chosen when the extension is loaded: wheels are built for the oldest.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PAGEDATTN_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define PAGEDATTN_CLONES
#endif
#define PAGEDATTN_INLINE inline __attribute__((always_inline))

namespace pagedattn {
namespace {

constexpr int64_t kLanes = 16;  // sums side by side, so that a compiler may use wide registers in any order of rounding

template <typename T>
struct Decodes {
  const T *query, *key, *value;
  T* out;
  const int32_t *table, *rows, *seqs, *lens;
  const int32_t* order;  // of the decodes, so that every thread has as many long ones
  int64_t block_size, kv_heads, group, dim, value_dim, table_stride;
  int64_t query_row, query_head, out_row, out_head;
  int64_t key_block, key_slot, key_head, value_block, value_slot, value_head;
  T scale;
};

template <typename T>
PAGEDATTN_INLINE T dot(const T* a, const T* b, int64_t dim) {
  T lane[kLanes] = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes)
    for (int64_t j = 0; j < kLanes; ++j) lane[j] += a[d + j] * b[d + j];
  T sum = 0;
  for (; d < dim; ++d) sum += a[d] * b[d];
  for (int64_t width = kLanes / 2; width > 0; width /= 2)
    for (int64_t j = 0; j < width; ++j) lane[j] += lane[j + width];
  return sum + lane[0];
}

// Heads first..last of all sequences' KV heads; `scores` has room for one group of the longest.
template <typename T>
PAGEDATTN_INLINE void attend(const Decodes<T>& in, int64_t first, int64_t last, std::vector<T>& scores) {
  for (int64_t item = first; item < last; ++item) {
    const int64_t at = in.order[item / in.kv_heads], head = item % in.kv_heads, length = in.lens[at];
    const int32_t* blocks = in.table + in.seqs[at] * in.table_stride;
    const T* query = in.query + in.rows[at] * in.query_row + head * in.group * in.query_head;
    T* out = in.out + in.rows[at] * in.out_row + head * in.group * in.out_head;
    for (int64_t begin = 0, column = 0; begin < length; begin += in.block_size, ++column) {
      const T* keys = in.key + blocks[column] * in.key_block + head * in.key_head;
      const int64_t count = std::min(in.block_size, length - begin);
      for (int64_t slot = 0; slot < count; ++slot)
        for (int64_t g = 0; g < in.group; ++g)
          scores[g * length + begin + slot] =
              dot(query + g * in.query_head, keys + slot * in.key_slot, in.dim) * in.scale;
    }
    for (int64_t g = 0; g < in.group; ++g) {
      T* row = scores.data() + g * length;
      T peak = -std::numeric_limits<T>::infinity(), total = 0;
      for (int64_t i = 0; i < length; ++i) peak = std::max(peak, row[i]);
      const T shift = std::isinf(peak) ? T(0) : peak;
      for (int64_t i = 0; i < length; ++i) total += row[i] = std::exp(row[i] - shift);
      for (int64_t i = 0; i < length; ++i) row[i] /= total;
      std::fill(out + g * in.out_head, out + g * in.out_head + in.value_dim, T(0));
    }
    for (int64_t begin = 0, column = 0; begin < length; begin += in.block_size, ++column) {
      const T* values = in.value + blocks[column] * in.value_block + head * in.value_head;
      const int64_t count = std::min(in.block_size, length - begin);
      for (int64_t slot = 0; slot < count; ++slot)
        for (int64_t g = 0; g < in.group; ++g) {
          const T weight = scores[g * length + begin + slot];
          const T* from = values + slot * in.value_slot;
          T* to = out + g * in.out_head;
          for (int64_t d = 0; d < in.value_dim; ++d) to[d] += weight * from[d];
        }
    }
  }
}

PAGEDATTN_CLONES void attend_float(const Decodes<float>& in, int64_t first, int64_t last, std::vector<float>& scores) {
  attend(in, first, last, scores);
}

PAGEDATTN_CLONES void attend_double(
    const Decodes<double>& in, int64_t first, int64_t last, std::vector<double>& scores) {
  attend(in, first, last, scores);
}

// Whether every block that a sequence holds is in its table and in the cache.
template <typename T>
bool inside(const Decodes<T>& in, int64_t count, int64_t columns, int64_t num_blocks) {
  for (int64_t at = 0; at < count; ++at) {
    const int64_t held = (in.lens[at] + in.block_size - 1) / in.block_size;
    if (held > columns) return false;
    const int32_t* blocks = in.table + in.seqs[at] * in.table_stride;
    for (int64_t column = 0; column < held; ++column)
      if (blocks[column] < 0 || blocks[column] >= num_blocks) return false;
  }
  return true;
}

// Indices of the decodes: threads get equal runs of them, and of every so many of about one length, each gets one.
std::vector<int32_t> dealt(const int32_t* lens, int64_t count) {
  std::vector<int32_t> sorted(static_cast<size_t>(count)), order;
  std::iota(sorted.begin(), sorted.end(), 0);
  std::stable_sort(sorted.begin(), sorted.end(), [&](int32_t a, int32_t b) { return lens[a] > lens[b]; });
  const size_t threads = std::max<size_t>(1, torch::stable::get_num_threads());
  for (size_t first = 0; first < threads; ++first)
    for (size_t at = first; at < sorted.size(); at += threads) order.push_back(sorted[at]);
  return order;
}

template <typename T, typename Attend>
bool run(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& block_table, const Tensor& rows,
    const Tensor& seqs, const Tensor& lens, double scale, const Tensor& out, Attend attend_items) {
  Decodes<T> in{};
  in.query = static_cast<const T*>(query.const_data_ptr());
  in.key = static_cast<const T*>(key.const_data_ptr());
  in.value = static_cast<const T*>(value.const_data_ptr());
  in.out = static_cast<T*>(out.mutable_data_ptr());
  in.table = static_cast<const int32_t*>(block_table.const_data_ptr());
  in.rows = static_cast<const int32_t*>(rows.const_data_ptr());
  in.seqs = static_cast<const int32_t*>(seqs.const_data_ptr());
  in.lens = static_cast<const int32_t*>(lens.const_data_ptr());
  in.block_size = key.sizes()[1];
  in.kv_heads = key.sizes()[2];
  in.group = query.sizes()[1] / in.kv_heads;
  in.dim = key.sizes()[3];
  in.value_dim = value.sizes()[3];
  in.table_stride = block_table.stride(0);
  in.query_row = query.stride(0), in.query_head = query.stride(1);
  in.out_row = out.stride(0), in.out_head = out.stride(1);
  in.key_block = key.stride(0), in.key_slot = key.stride(1), in.key_head = key.stride(2);
  in.value_block = value.stride(0), in.value_slot = value.stride(1), in.value_head = value.stride(2);
  in.scale = static_cast<T>(scale);
  const int64_t count = rows.numel();
  if (!inside(in, count, block_table.sizes()[1], key.sizes()[0])) return false;
  const std::vector<int32_t> order = dealt(in.lens, count);
  in.order = order.data();
  int64_t longest = 0;
  for (int64_t at = 0; at < count; ++at) longest = std::max<int64_t>(longest, in.lens[at]);
  torch::stable::parallel_for(0, count * in.kv_heads, 1, [&](int64_t first, int64_t last) {
    std::vector<T> scores(static_cast<size_t>(in.group * longest));
    attend_items(in, first, last, scores);
  });
  return true;
}

bool decode_attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& block_table, const Tensor& rows,
    const Tensor& seqs, const Tensor& lens, double scale, const Tensor& out) {
  if (query.scalar_type() == ScalarType::Double)
    return run<double>(query, key, value, block_table, rows, seqs, lens, scale, out, attend_double);
  return run<float>(query, key, value, block_table, rows, seqs, lens, scale, out, attend_float);
}

}  // namespace
}  // namespace pagedattn

STABLE_TORCH_LIBRARY_IMPL(pagedattn_csrc, CPU, m) {
  m.impl("decode_attention", TORCH_BOX(&pagedattn::decode_attention));
}
