"""What is measured: every suite's workloads, with the layer they are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from pagedattn import Mask
from pagedattn.cache.specs import FullAttentionSpec, KVCacheSpec, MLASpec
from pagedattn.errors import InvalidInputError
from pagedattn.formats.registry import format_of

from .workload import Workload, parse

# Of a layer on a CPU: a minute in all by TORCH, which does some 7 GFLOP and reads 1 GB of keys and values a second.
_CPU_GFLOP, _CPU_GB = 20.0, 2.0
_MOST_DRAFTED = 16  # tokens of a sequence beyond which a step is a prompt's
EXPANDED_DIM = 128  # of a latent layer's expanded head: of its key beside the rotated part, and of its value


class Case(NamedTuple):
    """One line of the table: a workload and a layer."""

    suite: str
    text: str
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    window: int = 0  # keys that a query sees at most; 0: all
    softcap: float = 0.0
    sinks: bool = False
    latent: int = 0  # of absorbed latent attention (MLA): how much of a row of `dim` is the value; 0: not latent
    dim_v: int = 0  # of the values' heads; 0: `dim`
    packed: bool = False  # keys and values of prompts as they are, without a cache (`kv_cache=None`)
    draw: str = ""  # of a random one SEED/NUMBER, by which it is drawn again

    @property
    def work(self) -> Workload:
        """Lengths of the step's sequences."""
        return parse(self.text)

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of queries, and of caches in the format `auto`."""
        return getattr(torch, self.dtype)

    @property
    def layer(self) -> str:
        """Heads, head dim, and what is unusual: `32/8/128`, `32/8/128 float16 int8 blocks of 64 window 1024`; of latent
        attention heads and both parts of a row, `16/512+64`, in blocks of 64 unless it says otherwise."""
        unusual = [self.dtype] if self.dtype not in ("bfloat16", "float32") else []
        unusual += [self.kv_cache_dtype] if self.kv_cache_dtype != "auto" else []
        unusual += [f"blocks of {self.block_size}"] if self.block_size != (64 if self.latent else 16) else []
        unusual += [f"window {self.window}"] if self.window else []
        unusual += [f"soft cap {self.softcap:g}"] if self.softcap else []
        unusual += ["sinks"] if self.sinks else []
        unusual += [f"values of {self.dim_v}"] if self.dim_v else []
        unusual += ["packed"] if self.packed else []
        row = f"{self.latent}+{self.dim - self.latent}" if self.latent else f"{self.kv_heads}/{self.dim}"
        return " ".join([f"{self.heads}/{row}", *unusual])

    @property
    def by_layer(self) -> bool:
        """Whether it is of a latent layer with its up-projections, and not of the absorbed kernels alone."""
        return self.suite == LATENT_PREFILL

    @property
    def query_dim(self) -> int:
        """Elements of a head's query: of a latent layer as they come, before anything is absorbed."""
        return EXPANDED_DIM + self.dim - self.latent if self.by_layer else self.dim

    @property
    def mask(self) -> Mask:
        """Which keys a query sees."""
        return Mask(causal=True, sliding_window=self.window or None)

    @property
    def scale(self) -> float:
        """What a query-key product is multiplied with; of latent attention that of the expanded head."""
        return ((EXPANDED_DIM + self.dim - self.latent) if self.latent else self.dim) ** -0.5

    @property
    def flops(self) -> float:
        """Of its products; a latent value is shorter than the key that it is part of."""
        equal = self.work.flops(self.heads, self.dim, self.window)
        return equal * (self.dim + (self.latent or self.dim_v or self.dim)) / (2 * self.dim)

    def bytes_read(self, kv_cache_dtype: str) -> int:
        """Bytes of keys and values, codes and scales, each read once from a cache of that format."""
        size = self.size_of_blocks(kv_cache_dtype)
        return self.work.keys_read(self.window) * self.cache_spec(size, kv_cache_dtype).bytes_per_block // size

    def size_of_blocks(self, kv_cache_dtype: str) -> int:
        """Tokens of a block in a format: the case's, or of formats that have, or want, larger ones, theirs."""
        least = 1 if self.latent or kv_cache_dtype == "auto" else format_of(kv_cache_dtype).default_block_size
        return max(self.block_size, least)

    def cache_spec(self, block_size: int, kv_cache_dtype: str = "auto") -> KVCacheSpec:
        """What a layer caches, in blocks of that size."""
        options = {"dtype": self.torch_dtype, "kv_cache_dtype": kv_cache_dtype, "block_size": block_size}
        if self.latent:
            return MLASpec(head_dim=self.dim, latent_dim=self.latent, **options)
        dims = {"head_dim": self.dim, "head_dim_v": self.dim_v or None}
        return FullAttentionSpec(num_kv_heads=self.kv_heads, **dims, **options)


def _decode() -> list[Case]:
    equal = ("1q1s1k", "1q1s8k", "1q1s32k", "1q1s128k", "16q1s2k", "64q1s4k", "256q1s1k", "128q1s8k")
    ragged = ("64q1s128*1.0906", "1q1s64k+31q1s512")
    return [
        *(Case("decode", text) for text in equal),
        *(Case("decode", text, 8, 1) for text in ("1q1s32k", "64q1s8k")),
        Case("decode", "48q1s3000..4927", 64, 8),
        Case("decode", "256q1s1k", 16, 8),
        *(Case("decode", text) for text in ragged),
    ]


def _prefill() -> list[Case]:
    return [
        *(Case("prefill", text) for text in ("32q512", "8q2k", "2q8k", "1q16k", "2q2ks16k")),
        *(Case("prefill", "1q16k", dim=dim) for dim in (64, 256)),
        Case("prefill", "1q16k", dtype="float16"),
        *(Case("prefill", "1q16k", block_size=size) for size in (32, 64, 128, 256)),
    ]


def _mixed() -> list[Case]:
    return [Case("mixed", text) for text in ("1q2ks4k+64q1s2k", "4q256s4k+128q1s3000")]


def _sweep() -> list[Case]:
    """Bandwidth by context and batch, up to a million keys a layer; speed of one prompt by its length."""
    batches, contexts = (1, 4, 16, 64, 256), (1, 2, 4, 8, 16, 32, 64, 128)
    decodes = [f"{b}q1s{k}k" for b in batches for k in contexts if b * k <= 1024]
    return [Case("sweep", text) for text in (*decodes, "1q512", *(f"1q{k}k" for k in (1, 2, 4, 8, 16, 32)))]


def _shared() -> list[Case]:
    """Decodes behind a prefix that all share; a kernel reads it once, or once for each of them."""
    return [Case("shared", text) for text in ("64q1s9k@8k", "256q1s2560@2k", "16q1s33k@32k")]


def _speculative() -> list[Case]:
    """Several tokens of each sequence, as a target model verifies what was drafted."""
    return [Case("speculative", text) for text in ("64q4s4k", "64q8s4k", "64q16s4k", "256q4s1k", "8q16s4k")]


def _append() -> list[Case]:
    """A few new tokens behind a long context, as a turn of a conversation has, or a document's last chunk."""
    texts = ("1q16s32k", "1q100s8k", "1q100s32k", "1q300s16k", "1q600s32k", "1q100s128k", "4q100s2k+2q100s30000")
    return [
        *(Case("append", text) for text in texts),
        Case("append", "1q100s32k", 8, 1),
        Case("append", "1q100s32k", dim=64),
    ]


def _head_dims() -> list[Case]:
    """Prompts with heads that are no power of two, beside those that are."""
    dims = [Case("dims", "4q4k", dim=dim) for dim in (64, 72, 80, 96, 112, 128, 160, 192, 256)]
    return [*dims, Case("dims", "4q4k", 32, 32, 96), Case("dims", "2q100s16k", 32, 32, 96), *_expanded_and_packed()]


def _expanded_and_packed() -> list[Case]:
    """Prompts of expanded latent attention, whose keys have heads of 192 and whose values of 128, over a cache and
    packed; then packed ones with heads of 128."""
    shapes = ((16, "1q16k"), (128, "1q4k"), (16, "8q2k"))
    pairs = [(Case("dims", text, n, n, 192, dim_v=128), packed) for n, text in shapes for packed in (False, True)]
    plain = [Case("dims", text, packed=True) for text in ("4q4k", "1q16k")]
    return [*(case._replace(packed=packed) for case, packed in pairs), *plain]


def _latent(text: str, heads: int, block_size: int = 64, suite: str = "mla") -> Case:
    """Latent attention over rows as DeepSeek-V2, V3 and R1 have them, absorbed."""
    return Case(suite, text, heads, 1, 576, block_size, latent=512)


def _mla() -> list[Case]:
    """Decodes of whole models and of what tensor parallelism leaves of their heads; then several new tokens of each
    sequence, and blocks of other sizes."""
    heads, ragged = (128, 64, 16, 8), "64q1s500*1.07"
    equal = ("1q1s8k", "64q1s4k", "256q1s1k", "16q1s32k")
    return [
        *(_latent(text, n) for n in heads for text in (*equal, ragged)),
        *(_latent(f"64q{tokens}s4k", n) for n in heads for tokens in (2, 4)),
        *(_latent("64q1s4k", n, size) for n in heads for size in (16, 32)),
        *(_latent(ragged, n, 16) for n in (128, 16)),
        *_latent_prefill(),
    ]


def _latent_prefill() -> list[Case]:
    """New tokens behind a context, around the number from which on the layer's expanded form takes less; and a long
    context, whose expanded keys must not be there all at once."""
    counts, contexts = ("32", "64", "128", "171", "256", "512", "2k"), ("8k", "32k")
    texts = [f"1q{count}s{context}" for context in contexts for count in counts]
    return [
        *(_latent(text, n, suite=LATENT_PREFILL) for n in (128, 16) for text in texts),
        _latent("1q2ks128k", 128, suite=LATENT_PREFILL),
    ]


def _formats() -> list[Case]:
    """What a cache's format can make slower: decodes, several tokens, a shared prefix, a few new tokens and a prompt,
    with heads of 128, 64, 96 and 256, and 9/3 of them."""
    layers, texts = ((32, 8, 128), (32, 8, 64), (32, 8, 96), (16, 8, 256), (9, 3, 64)), _FORMATS.items()
    return [Case(suite, text, *layer) for layer in layers for suite, text in texts]


_FORMATS = {
    "decode": "64q1s4k",
    "speculative": "64q4s4k",
    "shared": "64q1s9k@8k",
    "append": "1q100s32k",
    "prefill": "2q4k",
}
RANDOM, LATENT, FORMATS = "random", "mla", "formats"
LATENT_PREFILL = "mla prefill"  # of the suite LATENT those cases that are by layer; averaged apart
_GPU = {
    **{"decode": _decode(), "prefill": _prefill(), "mixed": _mixed()},
    **{"sweep": _sweep(), "shared": _shared(), "speculative": _speculative(), "append": _append()},
    **{"dims": _head_dims(), "mla": _mla(), "formats": _formats()},
}
_SMALL = {
    "decode": ["4q1s256", "3q1s40..120"],
    "prefill": ["2q128"],
    "mixed": ["1q64s128+2q1s100"],
    "shared": ["3q1s100@64"],
    "speculative": ["3q4s100"],
    "append": ["1q20s3000"],
    "dims": ["2q64"],
    "mla": ["3q1s40..120", "2q2s60"],
    "sweep": ["1q1s64", "1q1s128", "2q1s64", "2q1s128", "1q64", "1q128"],
}
_SMALL_FORMATS = {
    "decode": "2q1s40",
    "speculative": "2q4s40",
    "shared": "2q1s40@32",
    "append": "1q5s60",
    "prefill": "1q20",
}
_SMALL_LATENT_PREFILL = ("1q5s70", "1q40s130")
ATTENTION = ("decode", "prefill", "mixed")
NO_ATTENTION = ("cache", "engine")
_OTHERS = ("sweep", "shared", "speculative", "append", "dims", FORMATS, LATENT, RANDOM, "engine")
SUITES = (*ATTENTION, "cache", "all", *_OTHERS)


def cases(suite: str, gpu: bool) -> list[Case]:
    """The table of a suite of attention; `all` is decode, prefill and mixed. Without a GPU, tiny ones in float32.

    Suites of other things than attention layers have none here, and RANDOM's are drawn (`random_shapes`).
    """
    if suite == "all":
        return [case for one in ATTENTION for case in cases(one, gpu)]
    if suite in (*NO_ATTENTION, RANDOM):
        return []
    if gpu:
        return _GPU[suite]
    if suite == FORMATS:
        layers, texts = ((4, 2, 64), (2, 1, 256), (9, 3, 64)), _SMALL_FORMATS.items()
        return [Case(one, text, *layer, dtype="float32") for layer in layers for one, text in texts]
    some = [_small(suite, text) for text in _SMALL[suite]]
    if suite == "dims":
        some += [some[0]._replace(dim=24, dim_v=16, kv_heads=8), some[0]._replace(packed=True)]
    if suite == LATENT:
        some += [_small(LATENT_PREFILL, text) for text in _SMALL_LATENT_PREFILL]
    return some


def latent_cases(texts: Sequence[str], heads: Sequence[int], gpu: bool) -> list[Case]:
    """Those of the suite LATENT, or workloads of one's own, under each number of heads.

    Without `heads` all of the suite's; of a workload the most heads that the suite has.

    Raises:
        InvalidInputError: heads that the suite has no case of; else as `case_of`.
    """
    table = cases(LATENT, gpu)
    if texts:
        asked = heads or [max(case.heads for case in table)]
        return [case_of(text, gpu, LATENT)._replace(heads=n) for n in asked for text in texts]
    known = list(dict.fromkeys(case.heads for case in table))
    for n in heads:
        if n not in known:
            remedy = "name a --workload to measure another number"
            raise InvalidInputError("--heads", f"one of {', '.join(map(str, known))}", str(n), remedy)
    return [case for case in table if not heads or case.heads in heads]


def case_of(text: str, gpu: bool, suite: str | None = None) -> Case:
    """A workload of one's own, of the usual layer (of the suite LATENT, a latent one); without a GPU, of a small one.

    Raises:
        InvalidInputError: another grammar, or more than a CPU does in a minute.
    """
    work = parse(text)
    suite = suite or _suite(work)
    if gpu:
        return _latent(work.text, 128) if suite == LATENT else Case(suite, work.text)
    case = _small(suite, work.text)
    gflop = case.flops / 1e9
    gb = case.bytes_read("auto") / 1e9
    if gflop > _CPU_GFLOP or gb > _CPU_GB:
        expected = f"of at most {_CPU_GFLOP:.0f} GFLOP and {_CPU_GB:.0f} GB of keys and values a layer without a GPU"
        remedy = "take fewer or shorter sequences, such as 16q1s4k or 2q1k, or a machine with a GPU"
        raise InvalidInputError("workload", expected, f"{work.text} with {gflop:.1f} GFLOP and {gb:.1f} GB", remedy)
    return case


def _small(suite: str, text: str) -> Case:
    if suite in (LATENT, LATENT_PREFILL):
        return Case(suite, text, 4, 1, 576, 64, dtype="float32", latent=512)
    return Case(suite, text, 8, 2, 64, dtype="float32")


def _suite(work: Workload) -> str:
    if work.shared:
        return "shared"
    if work.num_decodes == len(work.seq_lens):
        return "decode"
    if work.num_decodes:
        return "mixed"
    if max(work.query_lens) <= _MOST_DRAFTED < min(work.seq_lens):
        return "speculative"
    return "append" if 4 * max(work.query_lens) <= min(work.seq_lens) else "prefill"
