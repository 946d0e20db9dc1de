"""A layer described on the command line: the options, and the AttentionSpec that they make."""

from __future__ import annotations

import argparse
import re

import torch

from ..errors import InvalidInputError
from ..formats.mla_rows.format import LATENT_DTYPES
from ..formats.per_layer import KVCacheDtype
from ..layers.mla_forms import LatentDims
from ..spec import (
    CACHE_LAYOUTS,
    KV_CACHE_DTYPES,
    KV_SCALES,
    AttentionSpec,
    AttentionType,
    ContextParallel,
    GraphLevel,
    Mask,
)

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_LATENT_DIM, _ROPE_DIM = 512, 64  # of a row, in most models that have latent attention
_NOPE_DIM, _V_DIM = 128, 128  # of a head there
_BY_TORCH = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def add_spec_options(parser: argparse.ArgumentParser) -> None:
    """Options for every field of AttentionSpec that a selection can depend on and a command line can say."""
    option = parser.add_argument
    option("--heads", type=int, required=True, help="query heads")
    option("--head-dim", type=int, help="size of a query or key head; required, but for --mla")
    option(
        "--mla",
        type=int,
        nargs="?",
        const=_LATENT_DIM,
        metavar="LATENT",
        help=f"latent attention: LATENT elements of a cached row are latent, {_LATENT_DIM} where not given; "
        f"--head-dim is the whole row, LATENT + {_ROPE_DIM} where not given",
    )
    option("--nope-dim", type=int, default=_NOPE_DIM, help=f"of --mla, a head's keys without rotation ({_NOPE_DIM})")
    option("--v-dim", type=int, default=_V_DIM, help=f"of --mla, a head's values, expanded ({_V_DIM})")
    option("--kv-heads", type=int, help="KV heads; as many as query heads where not given")
    option("--head-dim-v", type=int, help="size of a value head; --head-dim where not given")
    option("--dtype", type=dtype_of, help="of the model, as bf16 or bfloat16; bf16 on a GPU, else fp32 where not given")
    option("--device", type=_device_type, help="cuda, cpu, ...; cuda where torch finds a GPU, else cpu")
    option("--capability", type=_capability, help="compute capability like 9.0; that of the GPU here where not given")
    formats = f"{', '.join(KV_CACHE_DTYPES)}; of --mla {', '.join(LATENT_DTYPES)}"
    kept = "NAME:window=N or NAME:first=N for the last or the first N tokens in the model's dtype"
    option("--kv-cache-dtype", metavar="NAME", default="auto", help=f"of the cache: {formats}; {kept} (default: auto)")
    option("--kv-scale", choices=KV_SCALES, default="none", help="the kind of scale that stored elements have")
    option("--block-size", type=int, help="tokens per block; the backend chooses where not given")
    option("--layout", choices=CACHE_LAYOUTS, default=CACHE_LAYOUTS[0], help="memory layout of the cache")
    option("--window", type=int, help="sliding window in tokens, the token's own included")
    option("--softcap", type=float, help="soft cap of the logits")
    option("--alibi", action="store_true", help="ALiBi slopes come with each call")
    option("--sinks", action="store_true", help="sink logits come with each call")
    option("--lse", action="store_true", help="the log-sum-exp is wanted")
    option("--non-causal", action="store_true", help="tokens attend to later tokens too")
    kinds = [kind.value for kind in AttentionType]
    option("--attn-type", choices=kinds, default=AttentionType.DECODER.value, help="which tokens attend to which keys")
    option("--context-parallel", type=int, metavar="RANKS", help="ranks that the KV cache is sharded over")
    option("--deterministic", action="store_true", help="a token gets the same bits in any batch and any chunking")
    option("--compile", action="store_true", help="runs inside torch.compile")
    levels = [level.name.lower() for level in GraphLevel]
    option("--graph-level", choices=levels, default=levels[0], help="what a CUDA graph must be able to capture")
    option("--clean-cache", action="store_true", help="the caller zeroes every block that the pool hands out")
    option("--backend", help="NAME, or prefill=NAME,decode=NAME; PAGEDATTN_BACKEND or the fastest where not given")


def dtype_of(given: str) -> torch.dtype:
    """The dtype called `given`, by its short name or torch's; for argparse."""
    found = DTYPES.get(given) or _BY_TORCH.get(given)
    if found is None:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join((*DTYPES, *_BY_TORCH))}, got {given!r}")
    return found


def _device_type(given: str) -> str:
    try:
        return torch.device(given).type
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"expected a device type such as cuda or cpu, got {given!r}") from None


def _capability(given: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d+)", given)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected MAJOR.MINOR such as 9.0, got {given!r}")
    return int(match[1]), int(match[2])


def spec_of(args: argparse.Namespace) -> AttentionSpec:
    """The layer that parsed options describe; device, capability and dtype default to those of this machine.

    Raises:
        InvalidInputError: values that no layer has.
    """
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    capability = args.capability
    if capability is None and device == "cuda" and torch.cuda.is_available():
        capability = torch.cuda.get_device_capability()
    if args.head_dim is None and args.mla is None:
        raise InvalidInputError("--head-dim", "given, but for --mla", "None")
    head_dim = args.mla + _ROPE_DIM if args.head_dim is None else args.head_dim
    return AttentionSpec(
        num_heads=args.heads,
        head_dim=head_dim,
        num_kv_heads=args.kv_heads,
        head_dim_v=args.head_dim_v,
        latent_dim=args.mla,
        # Of a latent layer it is to be given; no backend's answer depends on it.
        scale=None if args.mla is None else (args.nope_dim + head_dim - args.mla) ** -0.5,
        dtype=args.dtype or (torch.bfloat16 if device == "cuda" else torch.float32),
        device_type=device,
        capability=capability,
        kv_cache_dtype=KVCacheDtype.of(args.kv_cache_dtype).of_one_layer(),
        kv_scale=args.kv_scale,
        block_size=args.block_size,
        cache_layout=args.layout,
        attn_type=AttentionType(args.attn_type),
        mask=Mask(False if args.non_causal else None, args.window),
        softcap=args.softcap,
        has_alibi=args.alibi,
        has_sinks=args.sinks,
        needs_lse=args.lse,
        context_parallel=None if args.context_parallel is None else ContextParallel(args.context_parallel, 0),
        deterministic=args.deterministic,
        compile=args.compile,
        graph_level=GraphLevel[args.graph_level.upper()],
        clean_cache=args.clean_cache,
    )


def latent_dims_of(args: argparse.Namespace, spec: AttentionSpec) -> LatentDims | None:
    """Sizes of the latent layer that parsed options describe; None for another layer.

    Raises:
        InvalidInputError: sizes that no head has.
    """
    if spec.latent_dim is None:
        return None
    for option, value in (("--nope-dim", args.nope_dim), ("--v-dim", args.v_dim)):
        if value < 1:
            raise InvalidInputError(option, "at least 1", value)
    return LatentDims(spec.num_heads, spec.latent_dim, spec.head_dim - spec.latent_dim, args.nope_dim, args.v_dim)
