// The ops' schemas. Each implementation registers itself, one file per op and device.
#include <torch/csrc/stable/library.h>

#include "block_copy.h"

namespace pagedattn {

// Raised with every change of a schema, here and in pagedattn/ops/library.py: a stale binary is then not used.
constexpr int64_t kRevision = 2;

int64_t revision() { return kRevision; }

// Whether the kernels can run on that GPU: not without CUDA, nor where none was compiled for its architecture.
bool cuda_ready([[maybe_unused]] int64_t device) {
#ifdef USE_CUDA
  return kernels_run_on(static_cast<int32_t>(device));
#else
  return false;
#endif
}

}  // namespace pagedattn

STABLE_TORCH_LIBRARY_FRAGMENT(pagedattn_csrc, m) {
  m.def("revision() -> int");
  m.def("cuda_ready(int device) -> bool");
  m.def(
      "reshape_and_cache(Tensor key, Tensor? value, Tensor(a!) key_cache, Tensor(b!)? value_cache, "
      "Tensor slot_mapping, Tensor? k_scale, Tensor? v_scale, float k_scale_value, float v_scale_value) -> ()");
  m.def(
      "reshape_and_cache_classic(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
      "Tensor slot_mapping) -> ()");
  m.def("copy_blocks(Tensor[] sources, Tensor(a!)[] targets, Tensor pairs) -> ()");
  m.def("swap_blocks(Tensor source, Tensor(a!) target, Tensor pairs, int mechanism) -> ()");
  m.def(
      "decode_attention(Tensor query, Tensor key, Tensor value, Tensor block_table, Tensor rows, Tensor seqs, "
      "Tensor lens, float scale, Tensor(a!) out) -> bool");
  m.def("gather_kv(Tensor cache, Tensor block_table, Tensor cu_lens, Tensor? starts, Tensor(a!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(pagedattn_csrc, CompositeExplicitAutograd, m) {
  m.impl("revision", TORCH_BOX(&pagedattn::revision));
  m.impl("cuda_ready", TORCH_BOX(&pagedattn::cuda_ready));
}
