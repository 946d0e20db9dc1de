"""Faults in what runs `generate` of transformers over a paged cache; as those of `mutant_list`."""

from __future__ import annotations

from mutant_anchor import Fault

ROWS_TEST, TEST = "test_hf_generate_rows.py", "test_hf_generate.py"
REFUSALS_TEST, DENSE_TEST = "test_hf_generate_refusals.py", "test_hf_dense.py"

FAULTS: tuple[Fault, ...] = (
    Fault("generate: a shared block that is written", "Rows._needs", "shared = left > 1", "shared = False",
          f"{ROWS_TEST} histories[0]"),
    Fault("generate: a copy on write that copies nothing", "Rows.append", "self.store.copy(copies)", "pass",
          f"{ROWS_TEST} histories[0]"),
    Fault("generate: the blocks of dropped rows kept", "Rows.take", "if not uses[row]:", "if False:",
          f"{TEST} test_tokens_equal llama"),
    Fault("generate: memory that grows and forgets", "BlockStore._take_memory",
          "cache.slabs[:, : self._num_blocks].copy_(old[layer].slabs)", "pass", f"{ROWS_TEST} histories[1]"),
    Fault("generate: tokens counted before they are through", "PagedCache.get_seq_length",
          "return self._columns.done", "return self._columns.count", f"{TEST} own_positions[gpt2]"),
    Fault("generate: a failed forward that counts", "PagedCache.begin", "if self._columns.running:", "if False:",
          f"{REFUSALS_TEST} failed_forward"),
    Fault("generate: a paged cache where attention is not paged", "_refuse_others",
          "if not (columns.running and attention):", "if False:", f"{REFUSALS_TEST} that_is_not_paged"),
    Fault("generate: packed rows that are one sequence", "sequences", "np.diff(positions, axis=1) != 1", "False",
          f"{DENSE_TEST} begin_anew llama"),
    Fault("generate: rows split that transformers does not", "packs_rows", "layer.mask.window == 1", "True",
          f"{DENSE_TEST} begin_anew opt"),
    Fault("an engine's positions, where a model's are others", "probe", "pair, None, Recorder()",
          "pair, torch.arange(2, device=device), Recorder()", "test_probe.py begin_at_0"),
    Fault("generate: rows that differ taken for alike", "PagedCache.begin", "if self._columns.count > self._alike[0]:",
          "if False:", f"{TEST} test_tokens_equal llama"),
    Fault("generate: padding between tokens under a window", "refuse_gaps", "if windowed and gap.any():", "if False:",
          f"{REFUSALS_TEST} masks_that_cannot"),
    Fault("generate: padding counted as tokens", "Columns.lengths", "(seen.sum(1) + max(",
          "((seen | True).sum(1) + max(", f"{ROWS_TEST} columns_count"),
    Fault("generate: sinks of another layer", "layer_of", " or sinks is not known", "",
          "test_attention_call.py built_with"),
)  # fmt: skip
