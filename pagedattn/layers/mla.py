"""MLAAttention: latent attention (MLA) as a layer. It writes latent rows to the paged cache and attends, absorbed or
expanded, whichever takes less."""

from __future__ import annotations

from dataclasses import replace

import torch

from .. import env, ops
from ..backends.base import AttentionMetadata
from ..backends.selector import Request, Selection, current_request, select_backend
from ..call import AttentionCall, lse_dtype
from ..errors import InvalidInputError
from ..formats.base import LayerCache
from ..formats.mla_rows.format import decode, split
from ..spec import AttentionSpec, AttentionType, GraphLevel, Mask, Scale
from ..spec.scales import LayerScales
from ..step.metadata import CommonAttentionMetadata
from .base import PagedLayer
from .mla_step import KeyChunk, LatentDims, MLAMetadata, MLAMetadataBuilder
from .plan_step import Key, StepMetadata
from .validation import check_latent_call

WORKSPACE_BYTES = 512 << 20  # of the keys and values that are expanded at once, where the layer is given no other bound


class MLAAttention(PagedLayer):
    """Latent attention of one model layer over a paged cache of latent rows, for inference: no gradient flows.

    What is cached of a token is one row [latent | k_pe], whatever the number of heads (`MLASpec`). Sequences of few new
    tokens are attended to absorbed: W_UK is applied to their queries and W_UV to their outputs, and all heads read the
    rows as they are. Those of many are attended to expanded: rows are gathered, W_UK and W_UV make keys and values of
    every head from them, at most `workspace_bytes` of these at once, and the chunks' attention is merged. Both are the
    same function; they round differently. Source: DeepSeek-V2 (2024), section 2.1.

    Args:
        latent_dim, rope_dim: L and R of a row. nope_dim, v_dim: N and V of an expanded head, which has N + R and V.
        scale: of the expanded head, (N + R) ** -0.5, times the square of yarn's mscale where the model has one.
            None is refused: a row of L + R elements does not tell it.
        sliding_window, softcap: as of `Attention`; a window is always attended to absorbed.
        kv_cache_dtype: "auto", rows of the model's dtype, or "fp8" ("fp8_e4m3"): all L + R elements divided by k_scale,
            rounded to e4m3 and saturated. What is written is rounded before it is read, of new tokens too.
        k_scale: of e4m3 rows, a float or a float32 tensor of one element; None is 1.
        block_size, cache_layout: of the cache; None lets the backend choose (`layer.selection.block_size`).
        max_absorbed_len: new tokens of a sequence up to which it is absorbed; None takes what arithmetic says, 171 for
            DeepSeek's sizes (`LatentDims.break_even`).
        workspace_bytes: of the keys and values that are expanded at once; one token's at least.
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
        for name, value in (("nope_dim", nope_dim), ("v_dim", v_dim), ("workspace_bytes", workspace_bytes)):
            if value < 1:
                raise InvalidInputError(name, "at least 1", value)
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
        usual = self.dims.break_even if sliding_window is None else 1 << 30
        self._most_absorbed = usual if max_absorbed_len is None or sliding_window else max_absorbed_len
        self._workspace_bytes = workspace_bytes
        self._request = current_request(backend)
        self._anchor_to(dtype, device)
        self._resolve()

    def _resolve(self) -> None:
        """Choose the backends for the dtype and device that the layer has now."""
        spec, asked = self._spec_here(), self._request
        absorbed = Request(asked.decode, asked.decode, asked.source)
        selection = select_backend(spec.replace(kv_scale=self._scales.kind), absorbed)
        source = self._scales.source if spec.format.takes_scales else ""
        self.selection: Selection = replace(selection, scales=source)
        self._placed_scales = self._scales.to(self._anchor.device)
        dense = Request(asked.prefill, asked.prefill, asked.source)
        self.expanded_selection: Selection = select_backend(self._expanded_spec(spec, causal=True), dense)
        self._impl = self.selection.decode.impl(self.selection.spec)
        self._dense = {
            causal: self.expanded_selection.prefill.impl(self._expanded_spec(spec, causal)) for causal in (True, False)
        }
        self._builder: MLAMetadataBuilder | None = None
        form = f"{self.selection.served_by}, expanded {self.dims.nope}/{self.dims.value} by"
        served = f"{form} {self.expanded_selection.served_by} from {self._most_absorbed + 1} tokens on"
        self._plan_key: Key = (self._kv_group, self.selection.spec, served)

    def _expanded_spec(self, spec: AttentionSpec, causal: bool) -> AttentionSpec:
        """Dense attention over packed keys and values of every head."""
        return AttentionSpec(
            num_heads=spec.num_heads,
            head_dim=self.dims.nope + self.dims.rope,
            head_dim_v=self.dims.value,
            dtype=spec.dtype,
            device_type=spec.device_type,
            capability=spec.capability,
            attn_type=AttentionType.ENCODER_ONLY,
            scale=spec.scale,
            mask=Mask(causal, spec.sliding_window if causal else None),
            softcap=spec.softcap,
            needs_lse=True,
        )

    @property
    def k_scale(self) -> Scale:
        """What stored elements of e4m3 rows are multiplied with, a tensor on the layer's device; None is 1."""
        return self._placed_scales.key

    @property
    def builder(self) -> MLAMetadataBuilder:
        """The metadata builder, made on first use."""
        if self._builder is None:
            device, spec, dense = self._anchor.device, self.spec, self.expanded_selection.prefill.builder
            absorbed = self.selection.decode.builder(spec, device)
            causal, full = (dense(self._expanded_spec(spec, one), device) for one in (True, False))
            most = max(1, self._workspace_bytes // self.dims.expanded_bytes(spec.dtype.itemsize))
            self._builder = MLAMetadataBuilder(absorbed, causal, full, self._most_absorbed, most)
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
            return self._dense[True].forward(call, built.packed)
        if kv_cache is None or built.packed is not None:
            expected, got = "None exactly where the metadata have no block table", type(kv_cache).__name__
            raise InvalidInputError("kv_cache", f"{expected}, and then with a latent", got, "pass cache.layer(i)")
        if latent is not None and k_pe is not None:
            ops.concat_and_cache_mla(latent, k_pe, kv_cache.key, built.common.slot_mapping, k_scale=self.k_scale)
        first, last = built.first_row, built.first_row + built.num_rows
        if built.absorbed is not None:
            rows = slice(None) if not built.num_rows else slice(0, first)
            self._attend_absorbed(q_nope[rows], q_pe[rows], w_uk, w_uv, kv_cache, built.absorbed, out[rows])
        if built.num_rows:
            query = torch.cat((q_nope[first:last], q_pe[first:last]), -1)
            self._attend_expanded(query, w_uk, w_uv, kv_cache, built, out[first:last])
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
        query: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
        kv_cache: LayerCache,
        metadata: MLAMetadata,
        out: torch.Tensor,
    ) -> None:
        """query [T', H, N + R]. Partial results are float32 (float64 of float64), and rounded once."""
        wide, state = lse_dtype(query.dtype), None
        for chunk in metadata.chunks:
            rows = self._gather(chunk, kv_cache, metadata.block_table)
            key, value = self._expand(*split(rows, self.dims.latent), w_uk, w_uv)
            for causal, dense in chunk.calls:
                lse = torch.empty(query.shape[:2], dtype=wide, device=query.device)
                call = AttentionCall(query, None, key, value, out if len(metadata.chunks) == 1 else None, lse)
                new = self._dense[causal].forward(call, dense), lse
                state = new if state is None else _merged(state, new, wide)
        if state is None:  # no keys at all
            out.zero_()
        elif state[0] is not out:
            out.copy_(state[0])

    def _gather(self, chunk: KeyChunk, kv_cache: LayerCache, block_table: torch.Tensor | None) -> torch.Tensor:
        """The rows of a chunk as they stand in the cache, [n, 1, L + R] in the layer's dtype."""
        if block_table is None:
            raise InvalidInputError("metadata", "with the block table of expanded sequences", "None")
        spans = (block_table, chunk.cu_lens, chunk.num_keys)
        rows, _ = ops.gather_kv(kv_cache.key, None, *spans, starts=chunk.starts)
        return decode(rows, self.k_scale, self.spec.dtype)

    def _expand(
        self, latent: torch.Tensor, k_pe: torch.Tensor, w_uk: torch.Tensor, w_uv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [n, H, N + R] and values [n, H, V] of n rows: latent [n, 1, L] and k_pe [n, 1, R]."""
        heads, _, rope, nope, value_dim = self.dims
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


_State = tuple[torch.Tensor, torch.Tensor]  # output and LSE


def _merged(one: _State, other: _State, wide: torch.dtype) -> _State:
    outputs = torch.stack((one[0].to(wide), other[0].to(wide)))
    return ops.merge_attn_states(outputs, torch.stack((one[1], other[1])))
