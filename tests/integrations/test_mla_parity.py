"""MLAAttention against the attention of DeepSeek-V2 and V3 in transformers: tiny random models, float32, on the CPU.

Projections and norms are the model's own. The rotation is by pairs in place, as checkpoints mean it: transformers moves
V3's pairs apart afterwards, of queries and keys alike, so that cached bytes differ and scores do not. Yarn is on, and
positions begin where it matters: a wrong scale is invisible at position 0.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pagedattn import BlockPool, CommonAttentionMetadata, MLAAttention, MLASpec, PagedKVCache
from pagedattn.testing import interpreted

pytest.importorskip("transformers")
v2 = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
v3 = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")

HIDDEN, L, R, N, V, S = 48, 32, 8, 16, 12, 4
TOKENS, FIRST = 21, 5003  # the position of the first token, beyond what the model was trained on before yarn
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "beta_fast": 32, "beta_slow": 1},
    "original_max_position_embeddings": 4096,
}
MSCALE = {"v2": 0.707, "v3": 1.0}  # mscale and mscale_all_dim of the released models
FORMS: dict[str, dict[str, Any]] = {
    "absorbed": {"max_absorbed_len": 1 << 20},
    "expanded": {"max_absorbed_len": 0},
    "expanded in chunks": {"max_absorbed_len": 0, "workspace_bytes": 1 << 12},
    "both": {"max_absorbed_len": 3},
}
CHUNKS = {"full": [TOKENS], "chunked": [8, 1, 9, 3], "token by token": [1] * TOKENS}


class Deepseek:
    """An attention module of transformers with random weights, and what it makes of random tokens."""

    def __init__(self, kind: str, heads: int, q_lora_rank: int | None) -> None:
        module = {"v2": v2, "v3": v3}[kind]
        name, width = kind.upper(), heads * max(1, HIDDEN // heads)
        mscale = {"mscale": MSCALE[kind], "mscale_all_dim": MSCALE[kind]}
        config = getattr(module, f"Deepseek{name}Config")(
            hidden_size=width,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            q_lora_rank=q_lora_rank,
            kv_lora_rank=L,
            qk_rope_head_dim=R,
            qk_nope_head_dim=N,
            v_head_dim=V,
            max_position_embeddings=163840,
            rope_parameters={**YARN, **mscale},
        )
        config._attn_implementation = "eager"
        torch.manual_seed(1)
        self.kind, self.heads = kind, heads
        self.attention = getattr(module, f"Deepseek{name}Attention")(config, 0).eval()
        for norm in (self.attention.kv_a_layernorm, getattr(self.attention, "q_a_layernorm", None)):
            if norm is not None:  # ones would hide a norm of the wrong weight
                torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
        self.hidden = torch.randn(1, TOKENS, width)
        positions = torch.arange(FIRST, FIRST + TOKENS)[None]
        rotary = getattr(module, f"Deepseek{name}RotaryEmbedding")(config)
        self.embeddings = rotary(self.hidden, positions)
        mask = torch.full((TOKENS, TOKENS), -torch.inf).triu(1)[None, None]
        with torch.no_grad():
            self.expected = self.attention(
                hidden_states=self.hidden, attention_mask=mask, position_embeddings=self.embeddings
            )[0][0]

    @property
    def scale(self) -> float:
        m = 0.1 * MSCALE[self.kind] * math.log(YARN["factor"]) + 1
        return (N + R) ** -0.5 * m * m

    def layer(self, **options: Any) -> MLAAttention:
        return MLAAttention(self.heads, L, R, N, V, **{"scale": self.scale, "block_size": S, **options})

    def parts(self) -> tuple[torch.Tensor, ...]:
        """q_nope, q_pe, latent and k_pe of all tokens."""
        module, hidden = self.attention, self.hidden
        if module.q_proj is not None:
            query = module.q_proj(hidden)
        else:
            query = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden)))
        q_nope, q_pe = query[0].unflatten(-1, (self.heads, N + R)).split((N, R), -1)
        latent, k_pe = module.kv_a_proj_with_mqa(hidden)[0].split((L, R), -1)
        return q_nope, self.rotated(q_pe), module.kv_a_layernorm(latent), self.rotated(k_pe[:, None])[:, 0]

    def rotated(self, rows: torch.Tensor) -> torch.Tensor:
        """[T, H, R], pairs (2i, 2i + 1) turned in place."""
        if self.kind == "v2":
            turn = self.embeddings[0]
        else:
            cos, sin = (x[0, :, : R // 2] for x in self.embeddings)
            turn = torch.complex(cos, sin)
        pairs = torch.view_as_complex(rows.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn[:, None]).flatten(-2)

    @torch.no_grad()
    def run(self, layer: MLAAttention, chunks: list[int]) -> torch.Tensor:
        """The layer's output of all tokens after the model's output projection, in steps of so many tokens."""
        q_nope, q_pe, latent, k_pe = self.parts()
        w_uk, w_uv = layer.split_kv_b(self.attention.kv_b_proj.weight)
        cache, table = latent_cache(), torch.tensor([[7, 3, 9, 1, 4, 8]], dtype=torch.int32)
        out, done = [], 0
        for new in chunks:
            mine, done = slice(done, done + new), done + new
            common = CommonAttentionMetadata.from_lengths([new], [done], table, block_size=S)
            parts = (q_nope[mine], q_pe[mine], latent[mine], k_pe[mine], w_uk, w_uv)
            out.append(layer(*parts, cache.layer(0), common))
        return self.attention.o_proj(torch.cat(out).flatten(1))


def latent_cache() -> PagedKVCache:
    cache = PagedKVCache.from_specs([MLASpec(head_dim=L + R, latent_dim=L, block_size=S)], num_blocks=24)
    cache.layer(0).key.fill_(torch.nan)
    return cache


@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("q_lora_rank", [None, 20], ids=["no q LoRA", "q LoRA"])
@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_every_form_and_chunking_is_the_model(kind: str, q_lora_rank: int | None, form: str, chunks: str) -> None:
    model = Deepseek(kind, 4, q_lora_rank)
    got = model.run(model.layer(**FORMS[form]), CHUNKS[chunks])
    torch.testing.assert_close(got, model.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", [1, 2, 5, 16, 128])
@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_any_number_of_heads(kind: str, heads: int) -> None:
    model = Deepseek(kind, heads, None)
    for form in ("absorbed", "expanded"):
        got = model.run(model.layer(**FORMS[form]), [18, 1, 2])
        torch.testing.assert_close(got, model.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(not interpreted(), reason="needs TRITON on the CPU")
def test_the_triton_kernel_is_the_model() -> None:
    model = Deepseek("v3", 16, None)
    got = model.run(model.layer(backend="prefill=TORCH,decode=TRITON", **FORMS["both"]), [17, 1, 3])
    torch.testing.assert_close(got, model.expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["v2", "v3"])
def test_the_scale_is_the_models_and_a_wrong_one_is_seen(kind: str) -> None:
    model = Deepseek(kind, 4, None)
    assert model.attention.scaling == pytest.approx(model.scale, rel=1e-12)
    for wrong in ((N + R) ** -0.5, (L + R) ** -0.5, model.scale / (0.1 * MSCALE[kind] * math.log(40.0) + 1)):
        got = model.run(model.layer(scale=wrong), CHUNKS["full"])
        assert float((got - model.expected)[1:].abs().max()) > 1e-3


@pytest.mark.parametrize("kind", ["v2", "v3"])
@torch.no_grad()
def test_a_prefix_hit_a_fork_and_a_preempted_sequence(kind: str) -> None:
    """A second sequence takes the first one's full blocks; a beam is forked from it; a third is computed again."""
    model, pool, cache = Deepseek(kind, 4, None), BlockPool(24), latent_cache()
    layer = model.layer(**FORMS["both"])
    parts, weights = model.parts(), layer.split_kv_b(model.attention.kv_b_proj.weight)

    def step(spans: list[tuple[list[int], int, int]]) -> list[torch.Tensor]:
        """Sequences by their blocks, and from which to which token they are computed."""
        width = max(len(blocks) for blocks, _, _ in spans)
        table = torch.tensor([blocks + [0] * (width - len(blocks)) for blocks, _, _ in spans], dtype=torch.int32)
        lens = [end - first for _, first, end in spans], [end for _, _, end in spans]
        rows = torch.cat([torch.arange(first, end) for _, first, end in spans])
        common = CommonAttentionMetadata.from_lengths(*lens, table, block_size=S)
        out = layer(*(part[rows] for part in parts), *weights, cache.layer(0), common)
        return list(model.attention.o_proj(out.flatten(1)).split(lens[0]))

    def check(got: torch.Tensor, first: int, end: int) -> None:
        torch.testing.assert_close(got, model.expected[first:end], atol=1e-5, rtol=1e-5)

    one = pool.allocate(6)
    check(step([(one, 0, 18)])[0], 0, 18)
    node = None
    for at in range(4):
        node = pool.commit(one[at], node, bytes([at]))
    hits: list[int] = []
    node = None
    for at in range(4):
        node = pool.find(node, bytes([at]))
        assert node is not None
        block = pool.block_of(node)
        assert block is not None
        hits.append(block)
    pool.touch(hits)
    two = [*hits, *pool.allocate(2)]
    beam, pairs = pool.fork(one[:5], has_open_block=True)
    cache.copy_blocks(pairs)
    beam += pool.allocate(1)
    got = step([(one, 18, 19), (beam, 18, 20), (two, 16, 21)])
    for out, ends in zip(got, ((18, 19), (18, 20), (16, 21)), strict=True):
        check(out, *ends)
    pool.free(two)  # preempted: computed again from the first token, into other blocks
    again = pool.allocate(6)
    for out, ends in zip(step([(one, 19, 21), (again, 0, 21)]), ((19, 21), (0, 21)), strict=True):
        check(out, *ends)
