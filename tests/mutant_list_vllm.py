"""Faults in vLLM's backend; as those of `mutant_list`."""

from __future__ import annotations

from mutant_anchor import Fault

STEPS, PLUGIN = "test_vllm_steps.py", "test_vllm_plugin.py"

FAULTS: tuple[Fault, ...] = (
    Fault("vLLM: keys and values of a packed cache swapped", "views",
          "codes = rows[..., :head_size], rows[..., head_size : 2 * head_size]",
          "codes = rows[..., head_size : 2 * head_size], rows[..., :head_size]", f"{STEPS} views_name"),
    Fault("vLLM: scales of an int8 cache in its codes", "int8_scales_at", "-(-2 * head_size // _ALIGNED) * _ALIGNED",
          "head_size // 4 * 4", f"{STEPS} int8_cache"),
    Fault("vLLM: one scale of an int8 row for K and V", "views", "scales[..., 1:]", "scales[..., :1]",
          f"{STEPS} int8_cache"),
    Fault("vLLM: slots that a wrapper sets ignored", "StepPlans.of",
          "if metadata.common.slot_mapping is not self.slot_mapping:", "if False:", f"{STEPS} wrapper_sets"),
    Fault("vLLM: a shared cache written twice", "PagedAttentionImpl.forward", "if not self._writes:", "if False:",
          f"{STEPS} shares_a_cache"),
    Fault("vLLM: packed keys followed by padding rows", "PagedAttentionImpl.forward",
          "attention.forward(query[:count], key[:count], value[:count], None, metadata, output[:count])",
          "attention.forward(query, key, value, None, metadata, output)", f"{STEPS} encoder"),
    Fault("vLLM: a graph's plan for steps of another shape", "graph_key", "common.max_query_len if uniform else -1",
          "-1", f"{STEPS} not_uniform"),
    Fault("vLLM: decodes behind a prompt counted", "leading_decodes",
          "int(others.argmax()) if others.any() else len(others)", "len(others) - int(others.sum())",
          f"{STEPS} in_front"),
    Fault("vLLM: a window forgotten", "PagedAttentionImpl.__init__", "sliding_window=sliding_window",
          "sliding_window=None", f"{STEPS} pair-NHD-0-window"),
    Fault("vLLM: scales of an 8-bit cache forgotten", "PagedAttentionImpl.forward",
          "(layer._k_scale, layer._v_scale)", "(torch.ones(()), torch.ones(()))", f"{STEPS} 8_bits"),
    Fault("vLLM: a cache of another dtype than the queries", "_why_not", "if _SAME_DTYPE.get(stored, dtype) != dtype:",
          "if False:", f"{PLUGIN} refusals_have"),
    Fault("vLLM: Ray's workers without variables", "copy_variables_to_ray", "os.environ[RAY_PREFIXES] = ",
          "_ = ", f"{PLUGIN} rays_workers"),
)  # fmt: skip
