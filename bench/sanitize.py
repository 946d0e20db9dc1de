"""Every op on every path, a few shapes each, for compute-sanitizer to watch; `make gpu-sanitize` runs it.

Results are compared too: a run that computed nothing would be clean as well.
"""

from __future__ import annotations

import argparse

import torch

from pagedattn import ops
from pagedattn.runtime import op_registry
from pagedattn.testing.case import Case
from pagedattn.testing.cases import CASES
from pagedattn.testing.conformance import check, load
from pagedattn.testing.problem import make_problem

DEVICE = torch.device("cuda")
HALF = torch.bfloat16
SHAPES = ((5, 2, 64), (1, 1, 24), (300, 8, 128), (7, 3, 7))  # tokens, heads, dim


def writes(path: str) -> int:
    """Same dtype and fp8, aligned and odd, with slots outside the cache."""
    done = 0
    for tokens, heads, dim in SHAPES:
        rows = torch.randn(2, tokens, heads, dim, device=DEVICE, dtype=HALF)
        slots = torch.randperm(tokens + 9, device=DEVICE)[:tokens] - 4
        for stored in (HALF, torch.float8_e4m3fn, torch.float8_e5m2):
            caches = torch.zeros(tokens // 4 + 1, 2, 4, heads, dim, device=DEVICE, dtype=HALF).to(stored)
            scale = None if stored == HALF else torch.full((heads,), 0.5, device=DEVICE)
            tensors = rows[0], rows[1], caches[:, 0], caches[:, 1], slots
            ops.reshape_and_cache(*tensors, k_scale=scale, v_scale=scale, path=path)
            live = (slots >= 0) & (slots < len(caches) * 4)
            want = rows[0] if scale is None else (rows[0].float() * 2).to(stored)
            got = caches[:, 0].contiguous().view(torch.uint8).flatten(0, 1)[slots.clamp(0, len(caches) * 4 - 1)]
            assert torch.equal(got[live], want.view(torch.uint8)[live])
            done += 1
    return done


def copies(path: str) -> int:
    """Within caches, with a source that is a target too, and to the host and back."""
    for words in (4096, 24):
        slabs = torch.randint(0, 256, (3, 40, words), dtype=torch.uint8, device=DEVICE)
        before, pairs = slabs.clone(), torch.tensor([[1, 9], [9, 30], [2, 3]])
        ops.copy_blocks(list(slabs), pairs, path=path)
        assert torch.equal(slabs[:, pairs[:, 1]], before[:, pairs[:, 0]])
        host = torch.zeros(40, words, dtype=torch.uint8, pin_memory=True)
        ops.swap_blocks(slabs[0], host, pairs, path=path)
        torch.cuda.synchronize()
        assert torch.equal(host[pairs[:, 1]], slabs[0, pairs[:, 0]].cpu())
        ops.swap_blocks(host, slabs[1], pairs[:, [1, 0]].contiguous(), path=path)
        assert torch.equal(slabs[1, pairs[:, 0]].cpu(), host[pairs[:, 1]])
    return 6


def gathers(path: str) -> int:
    for _, heads, dim in SHAPES:
        cache = torch.randn(12, 4, heads, dim, device=DEVICE, dtype=HALF)
        table = torch.randperm(12, device=DEVICE).int().view(2, 6)
        lens = torch.tensor([0, 17, 39], dtype=torch.int32, device=DEVICE)
        got, _ = ops.gather_kv(cache, None, table, lens, 41, path=path)
        assert torch.equal(got[:17], cache[table[0].long()].flatten(0, 1)[:17]) and not got[39:].any()
    return len(SHAPES)


def attention() -> int:
    """The Triton kernels on cases of the conformance suite that differ in the code they take."""
    wanted = ("default", "ragged decodes", "mixed", "padded decode batch", "dense with context", "long contexts")
    cases = [case for case in CASES if case.id in wanted]
    cases += [case for case in CASES if case.kv_cache_dtype != "auto" and case.head_dim % 16 == 0][:3]
    cases += [Case(sliding_window=17, sinks=0.5, softcap=5.0), Case(alibi=True, heads=(5, 1), deterministic=True)]
    # On Hopper, its prefill kernel: a decode among prompts, tails of blocks, and what a window releases.
    prompts = Case(head_dim=128, heads=(8, 2), query_lens=(1, 40, 130), seq_lens=(200, 40, 500))
    cases += [prompts, prompts.but(sliding_window=33, sinks=0.5, poison_behind=True, block_size=32)]
    for case in cases:
        variant = case.but(dtype=HALF)
        # On the CPU: what cuBLAS stores through TMA counts as never written.
        check(load("TRITON"), make_problem(variant, DEVICE, oracle_on="cpu"), variant.id)
    return len(cases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--paths", default="csrc,triton")
    paths = parser.parse_args().paths.split(",")
    assert op_registry.path_of("copy_blocks", DEVICE) == "csrc", op_registry.csrc_status()
    done = sum(run(path) for path in paths for run in (writes, copies, gathers))
    done += attention() if "triton" in paths else 0
    torch.cuda.synchronize()
    print(f"{done} calls by {' and '.join(paths)} checked")


if __name__ == "__main__":
    main()
