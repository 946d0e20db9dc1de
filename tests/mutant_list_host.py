"""Faults in what the host checks, copies and launches again, and the tests that must notice; see `mutants.py`."""

from __future__ import annotations

from mutant_anchor import Fault

FAULTS: tuple[Fault, ...] = (
    Fault("words as wide as the source's alone", "as_words", "for flat in flats for n in",
          "for flat in flats[:1] for n in", "test_block_copies.py different_alignment triton"),
    Fault("a negative scale left to torch's mask", "_prompt", "and inputs.scale > 0", "",
          "test_attention_cpu.py whatever_the_scale"),
    Fault("slots of another cache's block size", "_check_blocks",
          "common.block_size not in (None, kv_cache.block_size)",
          "False", "test_layer_checks.py argument_is_named"),
    Fault("decodes of several tokens", "check_lengths_within_bounds", "if not single or", "if",
          "test_layer_checks.py argument_is_named"),
    Fault("alignment not part of a launch's kind", "Launcher._launch", "(arg.dtype, not address & 15)",
          "(arg.dtype, True)", "test_launcher.py triton_takes"),
    Fault("unaligned tensors given to a repeated launch", "Replay.__call__", "if addresses & 15 or hooked()",
          "if hooked()", "test_launcher.py only_where_it_may_be"),
    Fault("a repeated launch with the first layer's tensors", "Replay.__call__", "made[at] = values[index]", "pass",
          "test_launcher.py a_checked_call_does"),
    Fault("a repeated launch with the first layer's descriptor", "Replay.__call__",
          "PlacedDescriptor(arguments[at], values[index])", "arguments[at]", "test_launcher.py tensor_descriptor"),
    Fault("the layout without the query's dtype", "layout_of", "query.dtype, query.device]", "query.device]",
          "test_launcher.py after_a_right_call"),
    Fault("the layout without the cache's", "layout_of", "about = [kind, layout,", "about = [kind,",
          "test_launcher.py after_a_right_call"),
    Fault("a repeated call with the first layer's key scale", "Recorded.again", "self.scale * k_number",
          "self.scale", "test_launcher.py a_checked_call_does"),
)  # fmt: skip
