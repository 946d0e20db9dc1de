// Rows of tokens and the paged caches they are written to or read from: what both devices need to know of them.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <optional>

namespace pagedattn {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The stride of a dimension that is never stepped along may be anything: 0 is divisible by everything.
inline int64_t step(const Tensor& tensor, int64_t dim) { return tensor.sizes()[dim] == 1 ? 0 : tensor.stride(dim); }

// Slots of a cache [P, S, H, D]. A slot that is not in [0, count) is skipped, so that no slot reaches past the cache.
struct Slots {
  const int64_t* slot;  // [tokens]
  int64_t tokens;
  int64_t count;  // P * S
  int64_t block_size;
};

// Rows [T, H, D] and the cache [P, S, H, D] of one of keys and values; strides in units of what is moved at once.
struct Side {
  const void* rows;
  void* cache;
  int64_t row_token, row_head;
  int64_t cache_block, cache_slot, cache_head;
  int heads, dim;  // dim in the same units as the strides
  const float* scale;  // on the device, or null: then scale_value holds
  int64_t scale_step;
  float scale_value;
};

inline Side side_of(const Tensor& rows, const Tensor& cache, const std::optional<Tensor>& scale, double scale_value) {
  Side side{};
  side.rows = rows.const_data_ptr();
  side.cache = cache.mutable_data_ptr();
  side.row_token = step(rows, 0);
  side.row_head = step(rows, 1);
  side.cache_block = step(cache, 0);
  side.cache_slot = step(cache, 1);
  side.cache_head = step(cache, 2);
  side.heads = static_cast<int>(cache.sizes()[2]);
  side.dim = static_cast<int>(cache.sizes()[3]);
  side.scale = scale ? static_cast<const float*>(scale->const_data_ptr()) : nullptr;
  side.scale_step = scale && scale->numel() > 1 ? scale->stride(0) : 0;
  side.scale_value = static_cast<float>(scale_value);
  return side;
}

inline Slots slots_of(const Tensor& slot_mapping, const Tensor& cache) {
  const int64_t size = cache.sizes()[1];
  const auto* slot = static_cast<const int64_t*>(slot_mapping.const_data_ptr());
  return {slot, slot_mapping.numel(), cache.sizes()[0] * size, size};
}

// What addresses and sizes are all divisible by: none has a bit set below that.
class Alignment {
 public:
  Alignment& add(int64_t bytes) {
    bits_ |= static_cast<uint64_t>(bytes);
    return *this;
  }
  Alignment& add(const void* address) { return add(static_cast<int64_t>(reinterpret_cast<uintptr_t>(address))); }
  // The widest power of two, at most `most`, that divides everything added.
  int64_t widest(int64_t most) const {
    const uint64_t limited = bits_ | static_cast<uint64_t>(most);
    return static_cast<int64_t>(limited & (~limited + 1));
  }

 private:
  uint64_t bits_ = 0;
};

inline Alignment row_alignment(const Side& side, int64_t size) {
  return Alignment().add(side.rows).add(side.row_token * size).add(side.row_head * size).add(side.dim * size);
}

inline Alignment cache_alignment(const Side& side, int64_t size) {
  return Alignment()
      .add(side.cache)
      .add(side.cache_block * size)
      .add(side.cache_slot * size)
      .add(side.cache_head * size)
      .add(side.dim * size);
}

// Dim and strides counted in words of `width` where an element has `size`; the word must divide them all.
inline Side in_words(Side side, int64_t width, int64_t size) {
  for (int64_t* one : {&side.row_token, &side.row_head, &side.cache_block, &side.cache_slot, &side.cache_head})
    *one = *one * size / width;
  side.dim = static_cast<int>(side.dim * size / width);
  return side;
}

inline bool is_fp8(ScalarType type) { return type == ScalarType::Float8_e4m3fn || type == ScalarType::Float8_e5m2; }

}  // namespace pagedattn
