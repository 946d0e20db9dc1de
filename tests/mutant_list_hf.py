"""Faults in what runs `generate` of transformers over a paged cache; as those of `mutant_list`."""

from __future__ import annotations

from mutant_list import Mutant, fault

ROWS, COLUMNS = "pagedattn/integrations/hf_rows.py", "pagedattn/integrations/hf_columns.py"
DENSE, PROBE = "pagedattn/integrations/hf_dense.py", "pagedattn/integrations/hf_probe.py"
CACHE, CALLS = "pagedattn/integrations/hf_cache.py", "pagedattn/integrations/hf_attention.py"
ROWS_TEST, TEST = "tests/integrations/test_hf_generate_rows.py", "tests/integrations/test_hf_generate.py"
REFUSALS_TEST, DENSE_TEST = "tests/integrations/test_hf_generate_refusals.py", "tests/integrations/test_hf_dense.py"

MUTANTS: tuple[Mutant, ...] = (
    fault("generate: a shared block that is written", ROWS, "shared = left > 1", "shared = False",
          f"{ROWS_TEST} histories[0]"),
    fault("generate: a copy on write that copies nothing", ROWS, "self.store.copy(copies)", "pass",
          f"{ROWS_TEST} histories[0]"),
    fault("generate: the blocks of dropped rows kept", ROWS, "if not uses[row]:", "if False:",
          f"{TEST} test_tokens_equal llama"),
    fault("generate: memory that grows and forgets", ROWS,
          "cache.slabs[:, : self._num_blocks].copy_(old[layer].slabs)", "pass", f"{ROWS_TEST} histories[1]"),
    fault("generate: tokens counted before they are through", CACHE,
          'of a forward that still runs not."""\n        return self._columns.done',
          'of a forward that still runs not."""\n        return self._columns.count', f"{TEST} own_positions[gpt2]"),
    fault("generate: a failed forward that counts", CACHE, "if self._columns.running:", "if False:",
          f"{REFUSALS_TEST} failed_forward"),
    fault("generate: a paged cache where attention is not paged", CACHE, "if not (columns.running and attention):",
          "if False:", f"{REFUSALS_TEST} that_is_not_paged"),
    fault("generate: packed rows that are one sequence", DENSE, "np.diff(positions, axis=1) != 1", "False",
          f"{DENSE_TEST} begin_anew llama"),
    fault("generate: rows split that transformers does not", PROBE, "layer.mask.window == 1", "True",
          f"{DENSE_TEST} begin_anew opt"),
    fault("an engine's positions, where a model's are others", PROBE, "pair, None, Recorder()",
          "pair, torch.arange(2, device=device), Recorder()", "tests/integrations/test_probe.py begin_at_0"),
    fault("generate: rows that differ taken for alike", CACHE, "if self._columns.count > self._alike[0]:", "if False:",
          f"{TEST} test_tokens_equal llama"),
    fault("generate: padding between tokens under a window", COLUMNS, "if windowed and gap.any():", "if False:",
          f"{REFUSALS_TEST} masks_that_cannot"),
    fault("generate: padding counted as tokens", COLUMNS, "(seen.sum(1) + max(", "((seen | True).sum(1) + max(",
          f"{ROWS_TEST} columns_count"),
    fault("generate: sinks of another layer", CALLS, " or sinks is not layer.sinks", "",
          "tests/integrations/test_attention_call.py built_with"),
)  # fmt: skip
