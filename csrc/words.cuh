// Words of 1 to 16 bytes. Streaming hints (ld.cs, st.cs) were measured to cost 3 to 5 % here: see pagedattn/kernels/cache_write/README.md.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace pagedattn {

template <int BYTES>
struct WordOf;
template <>
struct WordOf<16> {
  using type = uint4;
};
template <>
struct WordOf<8> {
  using type = uint2;
};
template <>
struct WordOf<4> {
  using type = uint32_t;
};
template <>
struct WordOf<2> {
  using type = unsigned short;
};
template <>
struct WordOf<1> {
  using type = unsigned char;
};

// Any trivial type of a word's size, loaded as that word through the read-only path.
template <typename T>
__device__ __forceinline__ T load(const T* from) {
  using Word = typename WordOf<sizeof(T)>::type;
  const Word word = __ldg(reinterpret_cast<const Word*>(from));
  T out;
  memcpy(&out, &word, sizeof(T));
  return out;
}

template <typename T>
__device__ __forceinline__ void store(T* to, const T& value) {
  using Word = typename WordOf<sizeof(T)>::type;
  Word word;
  memcpy(&word, &value, sizeof(T));
  *reinterpret_cast<Word*>(to) = word;
}

}  // namespace pagedattn
