// swap_blocks between two tensors of the host.
#include <torch/csrc/stable/library.h>

#include "../block_copy.h"

namespace pagedattn {
namespace {

void swap_blocks(const Tensor& source, const Tensor& target, const Tensor& pairs, int64_t /*mechanism*/) {
  copy_on_host(blocks_of(source, target), read_pairs(pairs, source.sizes()[0], target.sizes()[0]));
}

}  // namespace
}  // namespace pagedattn

STABLE_TORCH_LIBRARY_IMPL(pagedattn_csrc, CPU, m) { m.impl("swap_blocks", TORCH_BOX(&pagedattn::swap_blocks)); }
