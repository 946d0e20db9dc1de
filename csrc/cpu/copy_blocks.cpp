// copy_blocks on the CPU. Its caller keeps sources and targets apart (see pagedattn/ops/copy_blocks.py).
#include <torch/csrc/stable/library.h>

#include "../block_copy.h"

namespace pagedattn {
namespace {

void copy_blocks(const std::vector<Tensor>& sources, const std::vector<Tensor>& targets, const Tensor& pairs) {
  STD_TORCH_CHECK(sources.size() == targets.size() && !sources.empty(), "one target per source, and at least one");
  const auto checked = read_pairs(pairs, sources[0].sizes()[0], targets[0].sizes()[0]);
  for (size_t i = 0; i < sources.size(); ++i) copy_on_host(blocks_of(sources[i], targets[i]), checked);
}

}  // namespace
}  // namespace pagedattn

STABLE_TORCH_LIBRARY_IMPL(pagedattn_csrc, CPU, m) { m.impl("copy_blocks", TORCH_BOX(&pagedattn::copy_blocks)); }
