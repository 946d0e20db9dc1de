"""MLAAttention: absorbed, expanded and mixed steps against the float64 oracle, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pagedattn import (
    AttentionSpec,
    BlockPool,
    CommonAttentionMetadata,
    LayerCache,
    Mask,
    MLAAttention,
    MLASpec,
    PagedKVCache,
    plan_step,
)
from pagedattn.backends.registry import get_backend
from pagedattn.errors import CapacityError, InvalidInputError, UnsupportedError
from pagedattn.layers.mla_forms import LatentDims
from pagedattn.layers.mla_pieces import ExpandedBytes, plan_chunks
from pagedattn.layers.mla_step import MLAMetadata
from pagedattn.spec import GraphLevel
from pagedattn.testing import interpreted, mla_expanded_oracle
from pagedattn.testing.stored import bits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, L, R, N, V, S = 3, 16, 8, 12, 10, 4
SCALE = 0.3
SIZES: dict[str, Any] = {"num_heads": HEADS, "latent_dim": L, "rope_dim": R, "nope_dim": N, "v_dim": V}


class Model:
    """One layer's weights, and the tokens of each sequence so far."""

    stored = "auto"

    def __init__(
        self, lengths: list[int], dtype: torch.dtype = torch.float32, device: torch.device = DEVICE, seed: int = 0
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype, self.device = dtype, device
        self.weight = self.normal(HEADS * (N + V), L) * 0.4
        spec = MLASpec(head_dim=L + R, latent_dim=L, block_size=S, dtype=dtype, kv_cache_dtype=self.stored)
        self.cache = PagedKVCache.from_specs([spec], 200, device=device)
        self.cache.layer(0).key.copy_(torch.full((), torch.nan))
        self.rows = [self.normal(n, L + R) for n in lengths]
        blocks = torch.randperm(199, generator=self.generator).to(torch.int32) + 1
        width = max(-(-n // S) for n in lengths) + 1
        self.table = blocks[: width * len(lengths)].view(len(lengths), width).to(device)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device, self.dtype)

    def step(self, query_lens: list[int], seq_lens: list[int]) -> CommonAttentionMetadata:
        return CommonAttentionMetadata.from_lengths(query_lens, seq_lens, self.table, block_size=S)

    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as the cache holds them."""
        return rows

    def decode(self, stored: torch.Tensor) -> torch.Tensor:
        """What stands in the cache, in the oracle's digits."""
        return stored

    def fill(self, seq_lens: list[int]) -> None:
        """Write the first tokens of every sequence, as earlier steps would have."""
        flat = bits(self.cache.layer(0).key.flatten(0, 1))
        for row, (rows, count) in enumerate(zip(self.rows, seq_lens, strict=True)):
            for at in range(count):
                flat[int(self.table[row, at // S]) * S + at % S, 0] = bits(self.encode(rows[at]))

    def run(
        self, layer: MLAAttention, query_lens: list[int], seq_lens: list[int], padding: int = 0, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A step's output, and what it should be."""
        total = sum(query_lens)
        q_nope, q_pe = self.normal(total + padding, HEADS, N), self.normal(total + padding, HEADS, R)
        new = [x[end - n : end] for x, n, end in zip(self.rows, query_lens, seq_lens, strict=True)]
        rows = torch.cat([*new, self.normal(padding, L + R)])
        w_uk, w_uv = layer.split_kv_b(self.weight)
        common = options.pop("metadata", None) or self.step(query_lens, seq_lens)
        call = options.pop("call", layer)
        out = call(q_nope, q_pe, rows[:, :L], rows[:, L:], w_uk, w_uv, self.cache.layer(0), common, **options)
        want, start = [], 0
        for seen, n, end in zip(self.rows, query_lens, seq_lens, strict=True):
            mine, keys = slice(start, start + n), self.decode(self.encode(seen[:end]))
            parts = (q_nope[mine], q_pe[mine], keys[:, :L], keys[:, L:], w_uk, w_uv)
            mask, cap = layer.spec.mask, layer.spec.softcap
            want.append(mla_expanded_oracle(*parts, scale=SCALE, mask=mask, softcap=cap)[0])
            start += n
        return out[:total], torch.cat(want)


def layer_of(**options: Any) -> MLAAttention:
    return MLAAttention(**SIZES, scale=SCALE, **{"device": DEVICE, **options})


BYTES = ExpandedBytes.of(LatentDims(HEADS, L, R, N, V), torch.float32, None)
FORMS: dict[str, dict[str, Any]] = {
    "as arithmetic says": {},
    "absorbed": {"max_absorbed_len": 1 << 20},
    "expanded": {"max_absorbed_len": 0},
    "decodes absorbed": {"max_absorbed_len": 1},
    "expanded, few keys at once": {"max_absorbed_len": 0, "workspace_bytes": 24 * HEADS * BYTES.merged_row},
    "expanded, a head at once": {"max_absorbed_len": 0, "workspace_bytes": 60 * BYTES.merged_row},
    "expanded, few rows of a head at once": {"max_absorbed_len": 0, "workspace_bytes": 10 * BYTES.merged_row},
    "expanded, a row and a key at once": {"max_absorbed_len": 0, "workspace_bytes": 1},
}
STEPS = {
    "prompts": ([9, 1, 14], [9, 1, 14]),
    "decodes": ([1, 1, 1], [9, 30, 4]),
    "chunks": ([7, 12, 3], [20, 12, 31]),
    "mixed": ([1, 2, 11], [17, 5, 40]),
    "empty sequences": ([1, 0, 6], [8, 0, 6]),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_oracle(form: str, step: str) -> None:
    query_lens, seq_lens = STEPS[step]
    model = Model(seq_lens)
    model.fill([total - new for new, total in zip(query_lens, seq_lens, strict=True)])
    got, want = model.run(layer_of(**FORMS[form]), query_lens, seq_lens)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("form", ["absorbed", "expanded", "expanded, few keys at once"])
@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"sliding_window": 5}], ids=str)
def test_soft_cap_and_window(form: str, options: dict[str, Any]) -> None:
    model = Model([20, 9])
    model.fill([8, 4])
    got, want = model.run(layer_of(**FORMS[form], **options), [12, 5], [20, 9])
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)


@pytest.mark.skipif(DEVICE.type == "cpu" and not interpreted(), reason="needs TRITON")
@pytest.mark.parametrize("backend", ["TORCH", "TRITON", "prefill=TORCH,decode=TRITON"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_backends_and_dtypes(backend: str, dtype: torch.dtype) -> None:
    if interpreted() and dtype == torch.bfloat16 and "TRITON" in backend:
        with pytest.raises(UnsupportedError, match="interpreter"):
            layer_of(backend=backend, dtype=dtype)
        return
    model, gate = Model([9, 22], dtype), {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    model.fill([8, 10])
    layer = layer_of(backend=backend, dtype=dtype, max_absorbed_len=1)
    got, want = model.run(layer, [1, 12], [9, 22])
    assert got.dtype == dtype
    assert float((got.double() - want).norm() / want.norm()) < gate
    assert backend.rpartition("=")[2] in repr(layer) and layer.selection.decode.name in backend


def test_chunk_by_chunk_token_by_token_and_after_a_prefix_hit() -> None:
    """Sequence 1 begins with sequence 0's first two blocks, which it does not compute again."""
    model, layer = Model([19, 17]), layer_of(max_absorbed_len=3)
    model.rows[1][: 2 * S] = model.rows[0][: 2 * S]
    pool = BlockPool(200)
    blocks = pool.allocate(5)
    model.table[0, :5] = torch.tensor(blocks)
    for query_lens, seq_lens in (([9, 0], [9, 0]), ([8, 0], [17, 0]), ([1, 0], [18, 0]), ([1, 0], [19, 0])):
        got, want = model.run(layer, query_lens, seq_lens)
        torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)
    node = pool.commit(blocks[0], None, b"first")
    pool.commit(blocks[1], node, b"second")
    hit = pool.find(None, b"first")
    assert hit is not None and pool.find(hit, b"second") is not None
    pool.touch(blocks[:2])
    model.table[1, :5] = torch.tensor([*blocks[:2], *pool.allocate(3)])
    got, want = model.run(layer, [1, 9], [19, 17])
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)
    copies, pairs = pool.fork(blocks, has_open_block=True)
    model.cache.copy_blocks(pairs)
    model.table[1, :5] = torch.tensor(copies)
    model.rows[1] = torch.cat((model.rows[0], model.normal(1, L + R)))
    got, want = model.run(layer, [0, 1], [19, 20])
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)


def test_nan_in_unused_slots_and_padding_rows_do_not_matter() -> None:
    for form in ("absorbed", "expanded", "decodes absorbed"):
        model = Model([6, 13])
        model.fill([5, 4])
        got, want = model.run(layer_of(**FORMS[form]), [1, 9], [6, 13], padding=3)
        torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)
    assert bool(model.cache.layer(0).key.isnan().any())


def test_nothing_is_written_without_a_latent_and_the_given_output_is_filled() -> None:
    model, layer = Model([7]), layer_of()
    model.fill([7])
    before = model.cache.slabs.clone()
    out, (w_uk, w_uv) = torch.empty(2, HEADS, V, device=DEVICE), layer.split_kv_b(model.weight)
    queries = model.normal(2, HEADS, N), model.normal(2, HEADS, R)
    got = layer(*queries, None, None, w_uk, w_uv, model.cache.layer(0), model.step([2], [7]), out)
    latent, k_pe = model.rows[0].split((L, R), 1)
    want, _ = mla_expanded_oracle(*queries, latent, k_pe, w_uk, w_uv, scale=SCALE)
    assert got is out and torch.equal(model.cache.slabs, before)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sliding_window": 5}], ids=str)
def test_without_a_cache_rows_of_the_call_are_attended_to(options: dict[str, Any]) -> None:
    lengths = [20, 1, 0, 9]
    model, layer, total = Model([20, 1, 1, 9]), layer_of(max_absorbed_len=1, **options), 30
    rows = torch.cat([seen[:n] for seen, n in zip(model.rows, lengths, strict=True)])
    queries, weights = (model.normal(total, HEADS, N), model.normal(total, HEADS, R)), layer.split_kv_b(model.weight)
    step = plan_step([layer], CommonAttentionMetadata.from_lengths(lengths, lengths, device=DEVICE))
    assert "expanded, without a cache: " in step.describe()
    got, want, start = layer(*queries, rows[:, :L], rows[:, L:], *weights, None, step), [], 0
    for n in lengths:
        mine, start = slice(start, start + n), start + n
        parts = queries[0][mine], queries[1][mine], rows[mine, :L], rows[mine, L:], *weights
        mask, cap = layer.spec.mask, layer.spec.softcap
        want.append(mla_expanded_oracle(*parts, scale=SCALE, mask=mask, softcap=cap)[0])
    torch.testing.assert_close(got.double(), torch.cat(want), atol=3e-6, rtol=1e-5)


def test_one_plan_serves_all_layers_of_a_kind_and_says_what_runs() -> None:
    layers = [layer_of(max_absorbed_len=1) for _ in range(2)]
    model = Model([17, 5, 40])
    step = plan_step([*layers, layer_of(max_absorbed_len=2)], model.step([1, 2, 11], [17, 5, 40]))
    assert len(step.by_key) == 2 and layers[0].plan_key == layers[1].plan_key
    text = step.describe()
    assert "expanded: 13 tokens, 45 keys in 2 chunks" in text and "expanded: 11 tokens" in text
    model.fill([16, 3, 29])
    for layer in layers:
        got, want = model.run(layer, [1, 2, 11], [17, 5, 40], metadata=step)
        torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)


def test_lengths_that_the_host_does_not_know_are_copied_for_long_sequences_only() -> None:
    model, layer = Model([20, 9]), layer_of(max_absorbed_len=4)
    model.fill([8, 8])
    unknown = model.step([12, 1], [20, 9]).replace(query_start_loc_cpu=None, seq_lens_cpu=None)
    built = layer.build(unknown)
    assert isinstance(built, MLAMetadata) and built.num_rows == 13
    got, want = model.run(layer, [12, 1], [20, 9], metadata=built)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)


@pytest.mark.skipif(DEVICE.type == "cpu" and not interpreted(), reason="needs TRITON")
def test_a_captured_step_is_absorbed_and_rewritten_in_place() -> None:
    layer = layer_of(backend="TRITON", max_absorbed_len=0, graph_level=GraphLevel.ALWAYS)
    model = Model([9, 22])
    step = plan_step([layer], model.step([1, 1], [9, 22]), capture=True)
    assert "absorbed: MLA decode kernel: 2 sequences" in step.describe() and "expanded: " not in step.describe()
    model.fill([5, 20])
    plan_step([layer], model.step([1, 1], [6, 21]), into=step)
    got, want = model.run(layer, [1, 1], [6, 21], metadata=step)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)
    with pytest.raises(CapacityError, match="the captured metadata holds at most 2"):
        plan_step([layer], model.step([4, 1], [6, 21]), into=step)


@pytest.mark.parametrize("form", ["absorbed", "expanded", "expanded, a head at once"])
def test_it_compiles_without_a_graph_break(form: str) -> None:
    model, layer = Model([7, 9]), layer_of(**FORMS[form])
    model.fill([6, 4])
    step = plan_step([layer], model.step([1, 5], [7, 9]))
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    got, want = model.run(layer, [1, 5], [7, 9], metadata=step, call=compiled)
    torch.testing.assert_close(got.double(), want, atol=3e-6, rtol=1e-5)


def test_break_even_is_where_the_multiplications_are_equal() -> None:
    assert LatentDims(128, 512, 64, 128, 128).break_even == LatentDims(16, 512, 64, 128, 128).break_even == 171
    for rows, absorbed_is_less in ((170, True), (171, False)):
        absorbed, expanded = rows * (512 + 64 + 512), rows * (128 + 64 + 128) + 512 * (128 + 128)
        assert (absorbed < expanded) == absorbed_is_less
    assert LatentDims(4, 8, 8, 64, 64).break_even > 1 << 20  # rows so narrow that they are always less


def test_break_even_is_as_measured_on_hopper() -> None:
    many, few = (LatentDims(heads, 512, 64, 128, 128) for heads in (128, 16))
    assert many.measured_break_even((9, 0)) == 240 and few.measured_break_even((9, 0)) == 483
    for elsewhere in (None, (8, 0), (12, 0)):
        assert few.measured_break_even(elsewhere) == many.measured_break_even(elsewhere) == 171
    narrow = LatentDims(4, 8, 8, 64, 64)
    assert narrow.measured_break_even((9, 0)) == narrow.break_even


@pytest.mark.parametrize("most", [1, 3, 7, 1000])
@pytest.mark.parametrize("step", [*STEPS.values(), ([3, 2], [2, 0])], ids=str)
def test_chunks_cover_each_visible_pair_of_row_and_key_once(step: tuple[list[int], list[int]], most: int) -> None:
    query_lens, seq_lens = step
    seen: dict[tuple[int, int, int], int] = {}
    for spans, calls in plan_chunks(query_lens, seq_lens, most):
        assert 0 < sum(count for _, count in spans) <= most
        for causal, segments in calls:
            assert sum(rows for rows, _ in segments) == sum(query_lens)
            keys = [(seq, at) for seq, (first, count) in enumerate(spans) for at in range(first, first + count)]
            row, key = 0, 0
            for rows, count in segments:
                for i in range(rows):
                    for j in range(count):
                        if not causal or j <= i + count - rows:
                            pair = (row + i, *keys[key + j])
                            seen[pair] = seen.get(pair, 0) + 1
                row, key = row + rows, key + count
    want, row = {}, 0
    for seq, (new, total) in enumerate(zip(query_lens, seq_lens, strict=True)):
        for i in range(new):
            want |= {(row + i, seq, at): 1 for at in range(max(total - new + i + 1, 0))}
        row += new
    assert seen == want


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "q_nope": ({"q_nope": torch.zeros(2, HEADS, N + 1)}, r"q_nope must be torch.float32 \[T, 3, 12\]"),
    "q_pe rows": ({"q_pe": torch.zeros(1, HEADS, R)}, "q_pe must be at least 2 rows"),
    "latent dtype": ({"latent": torch.zeros(2, L).half()}, "latent must be torch.float32"),
    "k_pe alone": ({"latent": None}, "k_pe must be given exactly where latent is"),
    "halves of kv_b": ({"w_uk": torch.zeros(HEADS, L, N)}, r"w_uk must be torch.float32 \[3, 12, 16\]"),
    "strides": ({"w_uv": torch.zeros(HEADS, L, V).transpose(1, 2)}, "w_uv must be contiguous in its last dimension"),
    "no cache": ({"kv_cache": None}, "kv_cache must be None exactly where the metadata have no block table"),
    "no table": (
        {"metadata": CommonAttentionMetadata.from_lengths([2], [2])},
        "seq_lens must be at most 0, the table's width",
    ),
    "another object": ({"kv_cache": torch.zeros(2)}, "kv_cache must be a LayerCache of latent rows"),
    "a cache of pairs": (
        {"kv_cache": PagedKVCache(1, 9, S, 1, L + R, head_dim_v=L).layer(0)},
        "kv_cache must be of latent rows, got values of their own; build the cache from MLASpec",
    ),
    "rows of another width": (
        {"kv_cache": LayerCache(torch.zeros(9, S, 1, 30), torch.zeros(9, S, 1, 30)[..., :L])},
        "kv_cache must be key and value",
    ),
    "metadata": ({"metadata": None}, "metadata must be of plan_step or of build"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    model, layer = Model([6], device=torch.device("cpu")), layer_of(device="cpu")
    w_uk, w_uv = layer.split_kv_b(model.weight)
    call: dict[str, Any] = {
        **{"q_nope": torch.zeros(2, HEADS, N), "q_pe": torch.zeros(2, HEADS, R), "latent": torch.zeros(2, L)},
        **{"k_pe": torch.zeros(2, R), "w_uk": w_uk, "w_uv": w_uv, "kv_cache": model.cache.layer(0)},
        "metadata": model.step([2], [6]),
    }
    changes, message = CHANGES[name]
    with pytest.raises(InvalidInputError, match=f"^{message}"):
        layer(**{**call, **changes})


def test_a_layer_that_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^scale must be given .* pass \(nope_dim \+ rope_dim\) \*\* -0.5"):
        MLAAttention(**SIZES)
    with pytest.raises(UnsupportedError, match=r"TORCH: kv_cache_dtype=int8 \(serves auto, fp8_e4m3, fp8_ds_mla\)"):
        layer_of(kv_cache_dtype="int8", device="cpu")
    with pytest.raises(InvalidInputError, match=r"^nope_dim must be an integer of at least 1, got 0"):
        MLAAttention(**{**SIZES, "nope_dim": 0}, scale=SCALE)
    for value in (-1, 2.5, True):
        with pytest.raises(InvalidInputError, match=f"^max_absorbed_len must be an integer of at least 0, got {value}"):
            layer_of(max_absorbed_len=value)
    with pytest.raises(InvalidInputError, match=r"^scale must be a number, or None, got '0\.1'"):
        MLAAttention(**SIZES, scale="0.1")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"^weight must be \[66, 16\]"):
        layer_of().split_kv_b(torch.zeros(L, 66))
    with pytest.raises(InvalidInputError, match=r"did you mean fp8_ds_mla\?"):
        layer_of(kv_cache_dtype="fp8_dsmla")
    spec = layer_of(device="cpu").spec.replace(has_sinks=True, has_alibi=True)
    for name in ("TRITON", "FLASHINFER", "FLASH_MLA", "TORCH"):
        found = [one.feature for one in get_backend(name).rejections(spec)]
        assert found.count("has_sinks") == found.count("has_alibi") == 1
    with pytest.raises(UnsupportedError, match="latent_dim=16"):
        layer_of(backend="FLASHINFER")


def test_a_layer_follows_its_model_to_another_dtype() -> None:
    layer = torch.nn.Sequential(layer_of(device="cpu")).double()[0]
    assert isinstance(layer, MLAAttention)
    assert layer.spec == AttentionSpec(
        num_heads=HEADS, head_dim=L + R, latent_dim=L, scale=SCALE, dtype=torch.float64, mask=Mask(True)
    )
    model = Model([12, 9], torch.float64, torch.device("cpu"))
    model.fill([4, 8])
    got, want = model.run(layer, [8, 1], [12, 9])
    torch.testing.assert_close(got, want, atol=1e-12, rtol=1e-10)
