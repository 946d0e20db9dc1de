"""Faults in what the host checks, copies and launches again, and the tests that must notice; see `mutants.py`."""

from __future__ import annotations

from mutant_list import Mutant, fault

LAUNCHER, LAYER_CALL = "pagedattn/ops/kernels/launcher.py", "pagedattn/layer_call.py"
ATTENTION_REPLAY = "pagedattn/ops/attention_replay.py"

MUTANTS: tuple[Mutant, ...] = (
    fault("words as wide as the source's alone", "pagedattn/ops/kernels/copy_blocks.py", "for flat in flats for n in",
          "for flat in flats[:1] for n in", "tests/ops/test_block_copies.py different_alignment triton"),
    fault("a negative scale left to torch's mask", "pagedattn/ops/attention_cpu.py", "and inputs.scale > 0", "",
          "tests/ops/test_attention_cpu.py whatever_the_scale"),
    fault("slots of another cache's block size", "pagedattn/checks.py",
          "common.block_size not in (None, kv_cache.block_size)", "False",
          "tests/test_layer_checks.py argument_is_named"),
    fault("decodes of several tokens", "pagedattn/checks.py", "if not single or", "if",
          "tests/test_layer_checks.py argument_is_named"),
    fault("alignment not part of a launch's kind", LAUNCHER, "(arg.dtype, not address & 15)", "(arg.dtype, True)",
          "tests/test_launcher.py triton_takes"),
    fault("unaligned tensors given to a repeated launch", LAUNCHER, "if addresses & 15 or hooked()", "if hooked()",
          "tests/test_launcher.py only_where_it_may_be"),
    fault("a repeated launch with the first layer's tensors", LAUNCHER, "made[at] = values[index]", "pass",
          "tests/test_launcher.py a_checked_call_does"),
    fault("a repeated launch with the first layer's descriptor", LAUNCHER, "_Placed(line[at], values[index])",
          "line[at]", "tests/test_launcher.py tensor_descriptor"),
    fault("the layout without the query's dtype", LAYER_CALL, "query.dtype, query.device]", "query.device]",
          "tests/test_launcher.py after_a_right_call"),
    fault("the layout without the cache's", LAYER_CALL, "about = [kind, cache,", "about = [kind,",
          "tests/test_launcher.py after_a_right_call"),
    fault("a repeated call with the first layer's key scale", ATTENTION_REPLAY, "self._scale * k_number", "self._scale",
          "tests/test_launcher.py a_checked_call_does"),
)  # fmt: skip
