"""Faults in how the engine's steps reach the device, and the tests that must notice; see `mutants.py`."""

from __future__ import annotations

from mutant_list import Mutant, fault

OVERLAP = "engine/overlap.py"
COUNTS, PENALIZE = "engine/token_counts.py", "engine/kernels/penalize.py"
RECOUNT, SCORES = "tests/engine/test_token_counts.py recount", "tests/engine/test_token_counts.py of_the_torch_path"

MUTANTS: tuple[Mutant, ...] = (
    fault("padding that stands in a request's row", "engine/decode_inputs.py", "target[0, count:] = nobody",
          "target[0, count:] = 0", "tests/engine/test_decode_graphs.py padded_rows_are_nobodys"),
    fault("a new block that the table does not get", "engine/kernels/decode_inputs.py",
          "tl.store(table + column, block)", "tl.store(table, block)",
          "tests/engine/test_decode_inputs.py what_torch_writes"),
    fault("padding that has a key", "engine/kernels/decode_inputs.py", "tl.where(live, position + 1, 0)",
          "position + 1", "tests/engine/test_decode_inputs.py what_torch_writes"),
    fault("a floor above the cutoff", "engine/kernels/cutoff.py", "masses >= top_p * whole",
          "masses >= 0.1 * top_p * whole", "tests/engine/test_draw_kernels.py cutoffs_are_those"),
    fault("candidates of every block at one place", "engine/kernels/cutoff.py", "place = count + tl.cumsum(",
          "place = tl.cumsum(", "tests/engine/test_draw_kernels.py cutoffs_are_those"),
    fault("a distribution too flat for the candidates", "engine/kernels/cutoff.py", "if count <= SIZE:", "if True:",
          "tests/engine/test_draw_kernels.py cutoffs_are_those"),
    fault("what is frozen stays so", "engine/garbage.py", "if not _alive:", "if _alive:",
          "tests/engine/test_garbage.py collected_again"),
    fault("a changed block that is not sent", "engine/device_state.py", "self.sent[group, rows, at] != current",
          "self.sent[group, rows, at] == 0", "tests/engine/test_device_state.py whatever_happened[0]"),
    fault("a token that nobody has read taken for another", "engine/step_inputs.py",
          "torch.where(ids[:num_decodes] < 0, own, ids[:num_decodes])", "ids[:num_decodes].clamp(min=0)",
          "tests/engine/test_overlap.py draws_the_same"),
    fault("UNKNOWN left after an interrupt", OVERLAP, "while request.token_ids[-1] == UNKNOWN:", "while False:",
          "tests/engine/test_overlap.py no_token[interrupt]"),
    fault("nothing remembered of who was preempted in flight", OVERLAP, "if request in self._gone:", "if False:",
          "tests/engine/test_overlap.py preempted_in_flight"),
    fault("noise that does not depend on the position", "engine/kernels/draw.py",
          "state ^ tl.load(lengths + at).to(tl.uint64)", "state", "tests/engine/test_draw_kernels.py tokens_are_those"),
    fault("the last token is not counted, TORCH", COUNTS, "2 * drawn)", "0 * drawn)", f"{RECOUNT} torch-0"),
    fault("the last token is not counted, TRITON", PENALIZE, "tl.where(drawn, 2, 0)", "0", f"{RECOUNT} kernel-0"),
    fault("a count that is not written back", PENALIZE, "tl.store(where, value, mask=drawn)",
          "tl.store(where, value, mask=index < 0)", SCORES),
    fault("a part of the vocabulary that counts another's token", PENALIZE, "index == tl.load(last_tokens + at)",
          "index % BLOCK == tl.load(last_tokens + at) % BLOCK", SCORES),
    fault("the last token of a prompt taken for drawn, TORCH", COUNTS, "rows.lengths[where] > settings[:, 3]",
          "rows.lengths[where] >= settings[:, 3]", f"{RECOUNT} torch-0"),
    fault("the last token of a prompt taken for drawn, TRITON", PENALIZE,
          "tl.load(lengths + at) > tl.load(settings + 3)", "tl.load(lengths + at) >= tl.load(settings + 3)",
          f"{RECOUNT} kernel-0"),
    fault("a prompt counted as output", COUNTS, "first=max(piece.first, piece.request.prompt_len)",
          "first=piece.first", f"{RECOUNT} torch-0"),
    fault("counts left of the row's last owner", COUNTS, "(fresh | (counted > known))", "(counted > known)",
          f"{RECOUNT} torch-0"),
    fault("a step run again that counts twice", COUNTS, "(fresh | (counted > known))", "fresh",
          f"{RECOUNT} torch-0"),
    fault("penalties left of the row's last owner", COUNTS, "self._owners[row] is not request",
          "self._owners[row] is None", "tests/engine/test_token_counts.py without_penalties[kernel"),
    fault("counts trusted after a failed step", "engine/runner.py", "self._counts.forget()", "pass",
          "tests/engine/test_token_counts.py failed_step"),
    fault("a key turned by another token's position", "engine/kernels/fused.py",
          "tl.load(positions + token).to(tl.int64)", "tl.load(positions).to(tl.int64)",
          "tests/engine/test_fused_ops.py turn_and_write"),
)  # fmt: skip
