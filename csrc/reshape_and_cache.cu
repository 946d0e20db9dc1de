// reshape_and_cache: keys and values of a step's tokens into their slots, in one launch.
//
// Bytes that must move: n * H * (D + Dv) * (bytes read + bytes written per element) + 8 n for the slots. 8192 tokens of
// 8 x 128 bf16, keys and values: 33.5 MB each way, 67 MB; an H200 copies at 4285 GB/s, so not below 15.7 us. 256 tokens
// are 2 MB, 0.5 us: there the floor is a launch and two round trips to memory (the slot, the row), about 2 us.
//
// What that asks for: 16 bytes per access, every load of a thread issued before its first store, and the rows loaded
// without waiting for the slots, which only the stores need. A thread keeps one column (head and place in it) for
// several tokens, so that its divisions are paid once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <torch/csrc/stable/library.h>

#include "cuda.h"
#include "rows.h"
#include "words.cuh"

namespace pagedattn {
namespace {

constexpr int kThreads = 256;
constexpr int kTokens = 2;       // per thread, where there are enough of them
constexpr int kBlocksPerSm = 4;  // that many thread blocks are enough

// Keys or values as the kernel sees them; strides and counts in vectors.
struct Columns {
  const void* rows;
  void* cache;
  int64_t row_token, row_head;
  int64_t cache_block, cache_slot, cache_head;
  int count;     // of a token: heads * per_head; 0 where there are none
  int per_head;
  const float* scale;
  int64_t scale_step;
  float scale_value;
};

Columns columns_of(const Side& side) {
  return {
      side.rows, side.cache, side.row_token, side.row_head, side.cache_block, side.cache_slot, side.cache_head,
      side.heads * side.dim, side.dim, side.scale, side.scale_step, side.scale_value};
}

// The same bytes.
template <int BYTES>
struct Copy {
  using Source = typename WordOf<BYTES>::type;
  using Target = Source;
  using Scale = float;
  static __device__ Target convert(const Source& from, float) { return from; }
};

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }

template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

// Quotients by one scale, as IEEE rounds them, without a division of each: with 1 / scale rounded to nearest
// the first correction leaves an error below a last place, and the second one rounds correctly (Markstein). Powers of
// two keep the scale near 1 and quotients finite: any of kBeyond or more saturates. NaN stays NaN.
struct Divisor {
  static constexpr float kBeyond = 262144.0f;
  float down, scale, inverse;

  explicit __device__ Divisor(float given) {
    const int exponent = min(max((__float_as_int(given) >> 23) & 255, 1), 253);
    down = __int_as_float((254 - exponent) << 23);
    scale = given * down;
    inverse = __frcp_rn(scale);
  }

  __device__ float quotient(float x) const {
    x *= down;
    asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(-kBeyond));
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(kBeyond));
    float near = x * inverse;
    near = fmaf(fmaf(near, scale, -x), -inverse, near);  // in this order -0.0 stays -0.0
    return fmaf(fmaf(near, scale, -x), -inverse, near);
  }
};

// N elements to fp8: nearest even, saturated (infinities too), NaN kept: the oracle's bits.
template <typename T, int N, __nv_fp8_interpretation_t KIND>
struct Quantise {
  using Source = Pack<T, N>;
  using Target = Pack<unsigned char, N>;
  using Scale = Divisor;
  static __device__ Target convert(const Source& from, const Divisor& divisor) {
    Target to;
    if constexpr (N == 1) {
      to.at[0] = __nv_cvt_float_to_fp8(divisor.quotient(to_float(from.at[0])), __NV_SATFINITE, KIND);
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 2) {
        const float2 two{divisor.quotient(to_float(from.at[i])), divisor.quotient(to_float(from.at[i + 1]))};
        const __nv_fp8x2_storage_t both = __nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, KIND);
        to.at[i] = static_cast<unsigned char>(both);
        to.at[i + 1] = static_cast<unsigned char>(both >> 8);
      }
    }
    return to;
  }
};

// Threads x: columns, y: tokens. A slot outside the cache is skipped; its row is read all the same, which is harmless.
template <typename Op, int TOKENS>
__global__ void __launch_bounds__(kThreads)
    write_rows(const Columns key, const Columns value, const Slots slots, const int shift) {
  using Source = typename Op::Source;
  using Target = typename Op::Target;
  const int column = blockIdx.y * blockDim.x + threadIdx.x;
  if (column >= key.count + value.count) return;
  const bool is_key = column < key.count;
  const Columns side = is_key ? key : value;
  const int within = is_key ? column : column - key.count;
  const int head = within / side.per_head, place = within % side.per_head;
  const auto* from = static_cast<const Source*>(side.rows) + head * side.row_head + place;
  auto* to = static_cast<Target*>(side.cache) + head * side.cache_head + place;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * (blockDim.y * TOKENS) + threadIdx.y;

  Source row[TOKENS];
  int64_t slot[TOKENS];
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
    const int64_t token = first + i * blockDim.y;
    slot[i] = -1;
    if (token < slots.tokens) {
      row[i] = load(from + token * side.row_token);
      slot[i] = slots.slot[token];
    }
  }
  const typename Op::Scale scale(side.scale ? side.scale[head * side.scale_step] : side.scale_value);
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
    if (slot[i] < 0 || slot[i] >= slots.count) continue;
    const int64_t block = shift >= 0 ? slot[i] >> shift : slot[i] / slots.block_size;
    const int64_t offset = slot[i] - block * slots.block_size;
    store(to + block * side.cache_block + offset * side.cache_slot, Op::convert(row[i], scale));
  }
}

template <typename Op>
void launch(const Columns& key, const Columns& value, const Slots& slots, int32_t device) {
  const int columns = key.count + value.count;
  if (columns == 0 || slots.count == 0 || slots.tokens == 0) return;
  const int chunks = (columns + kThreads - 1) / kThreads;
  const int width = (columns + chunks - 1) / chunks;
  const int rows = kThreads / width;
  const int shift = (slots.block_size & (slots.block_size - 1)) ? -1 : __builtin_ctzll(slots.block_size);
  const auto grid = [&](int tokens) {
    const int64_t per_block = rows * tokens;
    return dim3(static_cast<unsigned>((slots.tokens + per_block - 1) / per_block), chunks);
  };
  const cudaStream_t stream = current_stream(device);
  const dim3 block(width, rows), large = grid(kTokens);
  if (static_cast<int64_t>(large.x) * large.y >= kBlocksPerSm * num_sms(device))
    write_rows<Op, kTokens><<<large, block, 0, stream>>>(key, value, slots, shift);
  else
    write_rows<Op, 1><<<grid(1), block, 0, stream>>>(key, value, slots, shift);
  cuda_check(cudaGetLastError(), "reshape_and_cache");
}

void copy(const Side& key, const Side* value, const Slots& slots, int64_t size, int32_t device) {
  Alignment all;
  for (const Side* side : {&key, value})
    if (side) all.add(row_alignment(*side, size).widest(16)).add(cache_alignment(*side, size).widest(16));
  const int64_t width = all.widest(16);
  const Columns keys = columns_of(in_words(key, width, size));
  const Columns values = value ? columns_of(in_words(*value, width, size)) : Columns{};
  switch (width) {
    case 16: return launch<Copy<16>>(keys, values, slots, device);
    case 8: return launch<Copy<8>>(keys, values, slots, device);
    case 4: return launch<Copy<4>>(keys, values, slots, device);
    case 2: return launch<Copy<2>>(keys, values, slots, device);
    default: return launch<Copy<1>>(keys, values, slots, device);
  }
}

template <typename T, __nv_fp8_interpretation_t KIND>
void quantise(const Side& key, const Side* value, const Slots& slots, int32_t device) {
  constexpr int kVector = 16 / sizeof(T);
  bool aligned = true;
  for (const Side* side : {&key, value})
    if (side)
      aligned = aligned && row_alignment(*side, sizeof(T)).widest(16) == 16 &&
          cache_alignment(*side, 1).widest(kVector) == kVector;
  if (aligned) {
    const Columns values = value ? columns_of(in_words(*value, kVector, 1)) : Columns{};
    launch<Quantise<T, kVector, KIND>>(columns_of(in_words(key, kVector, 1)), values, slots, device);
  } else {
    launch<Quantise<T, 1, KIND>>(columns_of(key), value ? columns_of(*value) : Columns{}, slots, device);
  }
}

template <typename T>
void quantise(const Side& key, const Side* value, const Slots& slots, ScalarType stored, int32_t device) {
  if (stored == ScalarType::Float8_e4m3fn)
    quantise<T, __NV_E4M3>(key, value, slots, device);
  else
    quantise<T, __NV_E5M2>(key, value, slots, device);
}

void write(
    const Side& key, const Side* value, const Slots& slots, ScalarType given, ScalarType stored, int64_t size,
    int32_t device) {
  if (given == stored) return copy(key, value, slots, size, device);
  STD_TORCH_CHECK(is_fp8(stored), "rows and cache differ in dtype, and the cache is not fp8");
  if (given == ScalarType::Half) return quantise<__half>(key, value, slots, stored, device);
  if (given == ScalarType::BFloat16) return quantise<__nv_bfloat16>(key, value, slots, stored, device);
  STD_TORCH_CHECK(given == ScalarType::Float, "rows of an fp8 cache must be float16, bfloat16 or float32");
  quantise<float>(key, value, slots, stored, device);
}

void reshape_and_cache(
    const Tensor& key,
    const std::optional<Tensor>& value,
    const Tensor& key_cache,
    const std::optional<Tensor>& value_cache,
    const Tensor& slot_mapping,
    const std::optional<Tensor>& k_scale,
    const std::optional<Tensor>& v_scale,
    double k_scale_value,
    double v_scale_value) {
  const int32_t device = key_cache.get_device_index();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Slots slots = slots_of(slot_mapping, key_cache);
  const Side keys = side_of(key, key_cache, k_scale, k_scale_value);
  const ScalarType given = key.scalar_type(), stored = key_cache.scalar_type();
  const auto size = static_cast<int64_t>(key_cache.element_size());
  if (!value || !value_cache) return write(keys, nullptr, slots, given, stored, size, device);
  const Side values = side_of(*value, *value_cache, v_scale, v_scale_value);
  const ScalarType v_given = value->scalar_type(), v_stored = value_cache->scalar_type();
  if (v_given == given && v_stored == stored) return write(keys, &values, slots, given, stored, size, device);
  write(keys, nullptr, slots, given, stored, size, device);
  write(values, nullptr, slots, v_given, v_stored, static_cast<int64_t>(value_cache->element_size()), device);
}

}  // namespace
}  // namespace pagedattn

STABLE_TORCH_LIBRARY_IMPL(pagedattn_csrc, CUDA, m) {
  m.impl("reshape_and_cache", TORCH_BOX(&pagedattn::reshape_and_cache));
}
