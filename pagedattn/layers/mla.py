"""MLAAttention: latent attention (MLA) as a layer. It writes latent rows to the paged cache and attends, absorbed or
expanded, whichever takes less."""

from __future__ import annotations

from dataclasses import replace

import torch

from .. import env, ops
from ..backends.base import AttentionMetadata
from ..backends.selector import Selection, current_request
from ..call import AttentionCall, lse_dtype
from ..errors import InvalidInputError
from ..formats.base import LayerCache
from ..formats.mla_rows.format import decode, split
from ..spec import AttentionSpec, GraphLevel, Mask, Scale
from ..spec.scales import LayerScales
from ..step.metadata import CommonAttentionMetadata
from .base import PagedLayer
from .mla_forms import LatentDims, expanded_spec, select_forms
from .mla_pieces import ExpandedBytes
from .mla_step import DenseAttention, DenseCall, ExpandedRows, KeyChunk, MLAMetadata, MLAMetadataBuilder
from .plan_step import Key, StepMetadata
from .validation import check_latent_call

WORKSPACE_BYTES = 512 << 20  # that attention to expanded keys allocates, where the layer is given no other bound


class MLAAttention(PagedLayer):
    """Latent attention of one model layer over a paged cache of latent rows, for inference: no gradient flows.

    What is cached of a token is one row [latent | k_pe], whatever the number of heads (`MLASpec`). Sequences of few new
    tokens are attended to absorbed: W_UK is applied to their queries and W_UV to their outputs, and all heads read the
    rows as they are. Those of many are attended to expanded: rows are gathered, W_UK and W_UV make keys and values of
    every head from them, of so many heads and tokens at once that `workspace_bytes` is kept, and the chunks' attention
    is merged. Both are the same function; they round differently. Source: DeepSeek-V2 (2024), section 2.1.

    Args:
        latent_dim, rope_dim: L and R of a row. nope_dim, v_dim: N and V of an expanded head, which has N + R and V.
        scale: of the expanded head, (N + R) ** -0.5, times the square of yarn's mscale where the model has one.
            None is refused: a row of L + R elements does not tell it.
        sliding_window, softcap: as of `Attention`; a window is always attended to absorbed.
        kv_cache_dtype: "auto", rows of the model's dtype, or "fp8" ("fp8_e4m3"): all L + R elements divided by k_scale,
            rounded to e4m3 and saturated, or "fp8_ds_mla": rows of 512 + 64 in 656 bytes, with scales of their own for
            the latent part, and the rotated one in bfloat16. What is written is rounded before it is read, of new
            tokens too.
        k_scale: of e4m3 rows, a float or a float32 tensor of one element; None is 1.
        block_size, cache_layout: of the cache; None lets the backend choose (`layer.selection.block_size`).
        max_absorbed_len: new tokens of a sequence up to which it is absorbed; None takes what arithmetic says, 171 for
            DeepSeek's sizes (`LatentDims.break_even`), on Hopper GPUs what was measured, 240 for 128 heads, 483 for 16
            (`LatentDims.measured_break_even`). 0 expands all of them.
        workspace_bytes: that the expanded form allocates at once beside the output, whatever the lengths: gathered and
            decoded rows, expanded keys and values, queries, and partial results with their LSE. A row and a key of
            one head are always attended to, up to 12 KB of DeepSeek's sizes. Not counted: what the dense backend needs
            beside its output and LSE (logits of TORCH), the step's metadata, and calls without a cache.
        clean_cache: unused slots never hold NaN or Inf, see `PagedKVCache.zero_blocks`; some backends need that.
        graph_level: what a CUDA graph is to capture; captured steps are absorbed.
        backend: the name of one for both forms, or `prefill=A,decode=B`: A attends expanded, B absorbed.
        kv_group: whose block table this layer uses, see `PagedKVCache.group_of`.
        dtype, device: of queries and rows; follow `.to()` like a parameter's.

    Raises:
        UnsupportedError: the backend asked for, or every backend, cannot serve this; lists the reasons.
        InvalidInputError: no scale, or values that contradict each other, or an unknown backend.
    """

    def __init__(
        self,
        num_heads: int,
        latent_dim: int,
        rope_dim: int,
        nope_dim: int,
        v_dim: int,
        scale: float | None = None,
        *,
        sliding_window: int | None = None,
        softcap: float | None = None,
        kv_cache_dtype: str = "auto",
        k_scale: Scale = None,
        block_size: int | None = None,
        cache_layout: str = "NHD",
        max_absorbed_len: int | None = None,
        workspace_bytes: int = WORKSPACE_BYTES,
        clean_cache: bool = False,
        graph_level: GraphLevel = GraphLevel.NEVER,
        backend: str | None = None,
        kv_group: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        sizes = {"nope_dim": (nope_dim, 1), "v_dim": (v_dim, 1), "workspace_bytes": (workspace_bytes, 1)}
        if max_absorbed_len is not None:
            sizes["max_absorbed_len"] = max_absorbed_len, 0
        for name, (size, low) in sizes.items():
            if not isinstance(size, int) or isinstance(size, bool) or size < low:
                raise InvalidInputError(name, f"an integer of at least {low}", repr(size))
        self._kv_group = kv_group
        self.dims = LatentDims(num_heads, latent_dim, rope_dim, nope_dim, v_dim)
        self._base = AttentionSpec(
            num_heads=num_heads,
            head_dim=latent_dim + rope_dim,
            latent_dim=latent_dim,
            scale=scale,
            mask=Mask(True, sliding_window),
            softcap=softcap,
            dtype=torch.get_default_dtype() if dtype is None else dtype,
            kv_cache_dtype=kv_cache_dtype,
            block_size=block_size,
            cache_layout=cache_layout,
            clean_cache=clean_cache,
            graph_level=graph_level,
        )
        self._scales = LayerScales.given(k_scale, None, None, self._base.kv_cache_dtype, 1)
        self._max_absorbed_len = max_absorbed_len
        self._workspace_bytes = workspace_bytes
        self._request = current_request(backend)
        self._anchor_to(dtype, device)
        self._resolve()

    def _resolve(self) -> None:
        """Choose the backends for the dtype and device that the layer has now."""
        spec = self._spec_here()
        scaled = spec.replace(kv_scale=self._scales.kind)
        self._forms = select_forms(scaled, self.dims, self._request, self._max_absorbed_len)
        source = self._scales.source if spec.format.takes_scales else ""
        self.selection: Selection = replace(self._forms.absorbed, scales=source)
        self.expanded_selection: Selection = self._forms.expanded
        self._placed_scales = self._scales.to(self._anchor.device)
        self._impl = self.selection.decode.impl(self.selection.spec)
        self._builder: MLAMetadataBuilder | None = None
        form = f"{self.selection.served_by}, expanded {self.dims.nope + self.dims.rope}/{self.dims.value} by"
        served = f"{form} {self.expanded_selection.served_by} from {self._forms.expanded_from} tokens on"
        self._plan_key: Key = (self._kv_group, self.selection.spec, served)

    @property
    def k_scale(self) -> Scale:
        """What stored elements of e4m3 rows are multiplied with, a tensor on the layer's device; None is 1."""
        return self._placed_scales.key

    @property
    def builder(self) -> MLAMetadataBuilder:
        """The metadata builder, made on first use."""
        if self._builder is None:
            device, spec = self._anchor.device, self.spec
            absorbed = self.selection.decode.builder(spec, device)
            specs = {causal: expanded_spec(spec, self.dims, causal) for causal in (True, False)}
            dense = DenseAttention(self.expanded_selection.prefill, specs, device)
            (plane,) = spec.format.key.planes(spec.head_dim, spec.dtype)
            stored = None if plane.dtype == spec.dtype else plane.width * plane.dtype.itemsize
            size = ExpandedBytes.of(self.dims, spec.dtype, stored)
            most = self._workspace_bytes
            self._builder = MLAMetadataBuilder(absorbed, dense, self._forms.most_absorbed, size, most)
        return self._builder

    def split_kv_b(self, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """W_UK [H, N, L] and W_UV [H, V, L] as views of a model's kv_b weight [H * (N + V), L].

        Each head has its N rows and then its V rows in it: they are no two halves of the matrix.
        """
        heads, latent, _, nope, value = self.dims
        if weight.shape != (heads * (nope + value), latent):
            raise InvalidInputError("weight", f"[{heads * (nope + value)}, {latent}]", list(weight.shape))
        w_uk, w_uv = weight.unflatten(0, (heads, nope + value)).split((nope, value), 1)
        return w_uk, w_uv

    @torch.no_grad()
    def forward(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        latent: torch.Tensor | None,
        k_pe: torch.Tensor | None,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        kv_cache: LayerCache | None,
        metadata: StepMetadata | AttentionMetadata | CommonAttentionMetadata,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the new rows, then attend.

        Args:
            q_nope: [T, H, N]. q_pe: [T, H, R], rotated.
            latent: [T', L], normalised. k_pe: [T', R], rotated. Both None where nothing is to be written.
            w_uk: [H, N, L]. w_uv: [H, V, L]; views of the model's weight will do (`split_kv_b`).
            kv_cache: this layer's cache, of an `MLASpec`; None, where metadata have no block table: writes nothing,
                attends to `latent` and `k_pe` themselves, packed, expanded all at once.
            metadata: of `plan_step`, of `build`, or a CommonAttentionMetadata, which is built at once (slower).
            out: [T, H, V] to write to.

        Returns:
            [T, H, V].

        Raises:
            InvalidInputError: shapes, dtypes or devices that do not fit (PAGEDATTN_CHECK=1).
        """
        built = self._metadata(metadata)
        if env.check_level():
            weights = {"w_uk": w_uk, "w_uv": w_uv}
            parts = {"q_nope": q_nope, "q_pe": q_pe, "latent": latent, "k_pe": k_pe, **weights, "out": out}
            check_latent_call(self.spec, self.dims, parts, kv_cache, built.common)
        if out is None:
            out = q_nope.new_empty(*q_nope.shape[:2], self.dims.value)
        if kv_cache is None and built.packed is not None and latent is not None and k_pe is not None:
            key, value = self._expand(latent[:, None], k_pe[:, None], w_uk, w_uv)
            call = AttentionCall(torch.cat((q_nope, q_pe), -1), None, key, value, out)
            return built.packed.impl.forward(call, built.packed.metadata)
        if kv_cache is None or built.packed is not None:
            expected, got = "None exactly where the metadata have no block table", type(kv_cache).__name__
            raise InvalidInputError("kv_cache", f"{expected}, and then with a latent", got, "pass cache.layer(i)")
        if latent is not None and k_pe is not None:
            ops.concat_and_cache_mla(latent, k_pe, kv_cache.key, built.common.slot_mapping, k_scale=self.k_scale)
        if built.absorbed is not None:
            rows = slice(None) if not built.num_rows else slice(0, built.first_row)
            self._attend_absorbed(q_nope[rows], q_pe[rows], w_uk, w_uv, kv_cache, built.absorbed, out[rows])
        for piece in built.pieces:
            rows = piece.rows
            self._attend_expanded(q_nope[rows], q_pe[rows], w_uk, w_uv, kv_cache, piece, out[rows])
        return out

    def _attend_absorbed(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        kv_cache: LayerCache,
        metadata: AttentionMetadata,
        out: torch.Tensor,
    ) -> None:
        latent_dim = self.dims.latent
        query = q_nope.new_empty(*q_nope.shape[:2], latent_dim + self.dims.rope)
        in_latent, in_rope = split(query, latent_dim)
        _multiply(q_nope.transpose(0, 1), w_uk, in_latent.transpose(0, 1))
        in_rope.copy_(q_pe)
        summed = self._impl.forward(AttentionCall(query, kv_cache, k_scale=self.k_scale), metadata)  # [T, H, L]
        _multiply(summed.transpose(0, 1), w_uv.transpose(1, 2), out.transpose(0, 1))

    def _attend_expanded(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        kv_cache: LayerCache,
        piece: ExpandedRows,
        out: torch.Tensor,
    ) -> None:
        """Rows of a piece, by groups of its heads. What is allocated here and below is counted by `ExpandedBytes`."""
        if not piece.chunks:  # no keys at all
            out.zero_()
            return
        for first in range(0, self.dims.num_heads, piece.heads):
            heads = slice(first, first + piece.heads)
            query = torch.cat((q_nope[:, heads], q_pe[:, heads]), -1)
            state = _Accumulated(query, sum(len(chunk.calls) for chunk in piece.chunks), out[:, heads])
            for chunk in piece.chunks:
                self._attend_chunk(chunk, piece.block_table, w_uk[heads], w_uv[heads], kv_cache, state)
            del query, state  # before those of the next heads are made

    def _attend_chunk(
        self,
        chunk: KeyChunk,
        block_table: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        kv_cache: LayerCache,
        state: _Accumulated,
    ) -> None:
        rows = self._gather(chunk, kv_cache, block_table)
        key, value = self._expand(*split(rows, self.dims.latent), w_uk, w_uv)
        for call in chunk.calls:
            state.attend(call, key, value)

    def _gather(self, chunk: KeyChunk, kv_cache: LayerCache, block_table: torch.Tensor) -> torch.Tensor:
        """The rows of a chunk as they stand in the cache, [n, 1, L + R] in the layer's dtype."""
        spans = (block_table, chunk.cu_lens, chunk.num_keys)
        rows, _ = ops.gather_kv(kv_cache.key, None, *spans, starts=chunk.starts)
        return decode(rows, self.k_scale, self.spec.dtype)

    def _expand(
        self, latent: torch.Tensor, k_pe: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [n, h, N + R] and values [n, h, V] of n rows, latent [n, 1, L] and k_pe [n, 1, R], for the h heads that
        w_uk [h, N, L] and w_uv [h, V, L] are of."""
        _, _, rope, nope, value_dim = self.dims
        heads = len(w_uk)
        shared = latent.transpose(0, 1).expand(heads, -1, -1)
        key = latent.new_empty(len(latent), heads, nope + rope)
        _multiply(shared, w_uk.transpose(1, 2), key[..., :nope].transpose(0, 1))
        key[..., nope:] = k_pe
        value = latent.new_empty(len(latent), heads, value_dim)
        _multiply(shared, w_uv.transpose(1, 2), value.transpose(0, 1))
        return key, value

    def _metadata(self, metadata: StepMetadata | AttentionMetadata | CommonAttentionMetadata) -> MLAMetadata:
        if isinstance(metadata, StepMetadata):
            metadata = metadata.of(self.plan_key)
        if isinstance(metadata, CommonAttentionMetadata):
            metadata = self.build(metadata)
        if not isinstance(metadata, MLAMetadata):
            expected = "of plan_step or of build, or a CommonAttentionMetadata"
            raise InvalidInputError("metadata", expected, type(metadata).__name__)
        return metadata

    def extra_repr(self) -> str:
        heads, latent, rope, nope, value = self.dims
        return f"{heads} heads of {nope}+{rope}/{value} over rows of {latent}+{rope}, backend={self.selection.name}"


def _multiply(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
    """Batched product, without a copy where `out` is strided; torch.compile takes no such output."""
    if torch.compiler.is_dynamo_compiling():
        out.copy_(torch.bmm(a, b))
    else:
        torch.bmm(a, b, out=out)


class _Accumulated:
    """Attention of query rows over disjoint sets of keys, call by call: float32 (float64 of float64) where there are
    several, and rounded once. The last call writes `out`."""

    def __init__(self, query: torch.Tensor, num_calls: int, out: torch.Tensor) -> None:
        """query: [T', h, N + R]. out: [T', h, V]."""
        states, wide = min(num_calls, 2), lse_dtype(query.dtype)
        self._query, self._out, self._left = query, out, num_calls
        self._lses = query.new_empty(states, *out.shape[:2], dtype=wide)
        # The first is that of all calls so far, the second that of a new one.
        self._outputs = query.new_empty(states, *out.shape, dtype=wide) if states == 2 else None
        self._at = 0

    def attend(self, call: DenseCall, key: torch.Tensor, value: torch.Tensor) -> None:
        """key: [n, h, N + R]. value: [n, h, V]."""
        self._left -= 1
        target, lse = self._out if self._outputs is None else None, self._lses[self._at]
        new = call.impl.forward(AttentionCall(self._query, None, key, value, target, lse), call.metadata)
        if self._outputs is None:
            return
        self._outputs[self._at].copy_(new)
        if self._at:
            merged = self._outputs[0] if self._left else self._out
            self._lses[0].copy_(ops.merge_attn_states(self._outputs, self._lses, out=merged)[1])
        self._at = 1
