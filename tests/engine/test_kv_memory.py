"""How many blocks the cache gets, and what is refused because they do not suffice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_runner import make_runner
from tiny_models import hf_model, save

from pagedattn import PagedKVCache
from pagedattn.engine import KVGroup, SchedulerOutput
from pagedattn.engine.config import EngineConfig
from pagedattn.engine.worker import kv_memory
from pagedattn.engine.worker.kv_memory import BlockBytes, NumBlocks
from pagedattn.errors import CapacityError

# Of a token and KV head, keys and values of 128 elements in a model of bfloat16.
TOKEN_BYTES = {"auto": 512, "fp8": 256, "fp8_e5m2": 256, "int8": 264, "k8v4": 200}
GRAPHS = SchedulerOutput((), 0, ())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save(hf_model("qwen2-half-window", torch.float64), tmp_path)


class TestSizing:
    def config(self, **options: Any) -> EngineConfig:
        return EngineConfig(**{"model": "m", "max_num_batched_tokens": 100, "max_num_seqs": 8, **options})

    def size(self, device: str, **options: Any) -> int:
        return self.size_of(1000, device, **options)

    def size_of(self, block_bytes: int, device: str, **options: Any) -> int:
        """Blocks for sequences of 50 tokens, of which one takes 5 blocks of each group."""
        found = self.both(BlockBytes(block_bytes), [KVGroup(10), KVGroup(10)], device, **options)
        assert found.recent is None
        return found.cache

    def both(self, block_bytes: BlockBytes, groups: list[KVGroup], device: str, **options: Any) -> NumBlocks:
        config, graphs = self.config(**options), lambda: self.steps.append(GRAPHS) or 2_000
        return kv_memory.size_kv_blocks(
            config, torch.device(device), block_bytes, groups, 50, self.steps.append, graphs
        )

    def setup_method(self) -> None:
        self.steps: list[SchedulerOutput] = []

    def test_given(self) -> None:
        assert self.size("cpu", num_kv_blocks=7) == 7
        assert self.steps == []

    def test_a_length_that_was_asked_for_must_be_reached(self, caplog: pytest.LogCaptureFixture) -> None:
        """49 tokens are written of a sequence of 50: 10 blocks of two groups, and the null block."""
        assert self.size("cpu", num_kv_blocks=11, max_model_len=50) == 11
        words = "a sequence of 50 tokens needs 11 blocks and the KV cache has 10; lower max_model_len to 41"
        with pytest.raises(CapacityError, match=words):
            self.size("cpu", num_kv_blocks=10, max_model_len=50)
        assert self.size("cpu", num_kv_blocks=10) == 10 and "sequences end at 41 tokens" in caplog.text

    def second(self, device: str, window_blocks: int = 0, **options: Any) -> tuple[int, int | None]:
        """With a second cache of blocks of 10 tokens, beside which there is block 0."""
        return self.both(BlockBytes(1000, 5000), [KVGroup(10, window_blocks=window_blocks)], device, **options)

    def test_a_second_cache_has_a_block_for_each_sequence_and_each_block_of_a_step(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert self.second("cpu", num_kv_blocks=30) == (30, 19), "8 sequences and 100 tokens"
        assert self.second("cpu", num_kv_blocks=30, max_num_seqs=3) == (30, 14)
        assert self.second("cpu", num_kv_blocks=30, max_num_batched_tokens=91) == (30, 19)
        assert self.second("cpu", num_kv_blocks=9) == (9, 9), "what is not full has a block in the first cache too"
        assert self.second("cpu") == (41, 19)
        assert self.second("cpu", 2, num_kv_blocks=60) == (60, 35), "and the window of each"
        monkeypatch.setattr(kv_memory, "_CPU_BYTES", 100_000)
        assert self.second("cpu") == (41, 5), "a quarter of memory at most"
        monkeypatch.setattr(kv_memory, "_CPU_BYTES", 42_000)
        assert self.second("cpu", max_num_seqs=20) == (32, 2)

    def test_a_window_that_leaves_no_memory_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A CPU has room for one sequence at least, a GPU what there is: 10,000 bytes, of which two blocks take all
        but one of the second cache."""
        monkeypatch.setattr(kv_memory, "_CPU_BYTES", 17_000)
        assert self.second("cpu", 4) == (6, 6), "the null block, 4 of the window and an open one"
        for one in ("max_memory_reserved", "memory_reserved", "empty_cache", "reset_peak_memory_stats", "synchronize"):
            monkeypatch.setattr(torch.cuda, one, lambda *_: 0)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (19_000, 19_000))
        options = {"gpu_memory_utilization": 1.0, "kv_cache_dtype": "turboquant4:window=40"}
        assert self.second("cuda", 1, **options) == (2, 2)
        words = (
            r"leaves 0.00 GiB, two blocks and what each sequence keeps in the model's dtype, 4 blocks of 10 tokens, "
            r"need 0.00 GiB; lower window and first of kv_cache_dtype='turboquant4:window=40' to 1 blocks together, "
            r"lower max_model_len, or raise gpu_memory_utilization or lower max_num_batched_tokens \(100\)"
        )
        with pytest.raises(CapacityError, match=words):
            self.second("cuda", 4, **options)

    def test_what_is_asked_for_beside_a_second_cache_must_fit(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for free, most in ((95_000 + 30_999, 30), (12_999, 2), (19 * 6000, 19)):
            monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_, free=free: (free, 200_000))
            assert self.second("cuda", num_kv_blocks=most) == (most, min(most, 19))
            words = f"of 1000 bytes, and {min(most + 1, 19)} of 5000 for .* lower num_kv_blocks to {most} at most"
            with pytest.raises(CapacityError, match=words):
                self.second("cuda", num_kv_blocks=most + 1)

    def test_more_blocks_than_the_device_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (25_500, 100_000))
        assert self.size("cuda", num_kv_blocks=25) == 25
        with pytest.raises(CapacityError, match=r"num_kv_blocks=26 of 1000 bytes .* lower num_kv_blocks to 25 at most"):
            self.size("cuda", num_kv_blocks=26)

    def test_cpu(self) -> None:
        assert self.size("cpu") == 81
        assert self.size_of(1 << 28, "cpu") == 11
        assert self.size_of(1 << 25, "cpu") == 32

    @pytest.mark.parametrize("free", [40_000, 4_000])
    def test_gpu(self, free: int, monkeypatch: pytest.MonkeyPatch) -> None:
        facts = {
            "empty_cache": None,
            "reset_peak_memory_stats": None,
            "synchronize": None,
            "max_memory_reserved": 25_000,
            "memory_reserved": 20_000,
            "mem_get_info": (free, 100_000),
        }
        for name, value in facts.items():
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        if free < 10_000:
            for of_one in (self.size, self.second):
                with pytest.raises(CapacityError, match="gpu_memory_utilization"):
                    of_one("cuda")
            return
        assert self.second("cuda") == (13, 2), "2 of 5,000 and 13 of 1,000 bytes"
        self.steps.clear()
        # 100,000 x 0.9 - 60,000 in use - 5,000 of activations - 2,000 of graphs
        assert self.size("cuda") == 23
        prompts, decodes, graphs = self.steps
        assert graphs is GRAPHS, "graphs are measured when all else is warm"
        assert prompts.num_tokens == 100
        assert len(prompts.scheduled) == 8
        assert (decodes.num_tokens, decodes.num_decodes) == (8, 8)
        assert all(item.samples for item in (*prompts.scheduled, *decodes.scheduled))
        assert max(item.start + item.num_tokens for item in decodes.scheduled) == 50, "the model has 50 positions"

    @pytest.mark.parametrize("name", [*TOKEN_BYTES])
    def test_blocks_grow_by_the_ratio_of_bytes(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Of 32 layers with 8 heads of 128, in the 40 GiB that a GPU has left."""
        cache = PagedKVCache(32, 1, 10, 8, 128, dtype=torch.bfloat16, device="meta", kv_cache_dtype=name)
        room, token = 40 << 30, TOKEN_BYTES[name] * 8 * 32
        assert cache.nbytes == 10 * token
        for one in ("max_memory_reserved", "memory_reserved"):
            monkeypatch.setattr(torch.cuda, one, lambda *_: 0)
        for one in ("empty_cache", "reset_peak_memory_stats", "synchronize"):
            monkeypatch.setattr(torch.cuda, one, lambda *_: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (room + 2_000, room + 2_000))
        blocks = self.size_of(cache.nbytes, "cuda", gpu_memory_utilization=1.0)
        assert blocks == room // (10 * token)
        plain = room // (10 * TOKEN_BYTES["auto"] * 8 * 32)
        assert blocks / plain == pytest.approx(TOKEN_BYTES["auto"] / TOKEN_BYTES[name], rel=1e-4)

    @pytest.mark.parametrize("name", [*TOKEN_BYTES])
    def test_a_runner_counts_every_byte_of_its_format(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its cache takes the memory that there is but for less than a block, with scales and all planes."""
        monkeypatch.setattr(kv_memory, "_CPU_BYTES", 16 << 20)
        model = save(hf_model("qwen3", torch.float64, head_dim=128), tmp_path)
        runner = make_runner(model, num_kv_blocks=None, kv_cache_dtype=name, dtype="bfloat16")
        block = runner.cache.nbytes // runner.num_kv_blocks
        assert block == TOKEN_BYTES[name] * 16 * 2 * 4, "tokens, KV heads, layers"
        assert (16 << 20) - block < runner.cache.nbytes <= 16 << 20

    def test_a_runner_counts_every_byte_of_a_second_cache(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(kv_memory, "_CPU_BYTES", 16 << 20)
        model = save(hf_model("qwen3", torch.float64, head_dim=128), tmp_path)
        options = {"kv_cache_dtype": "int4", "dtype": "bfloat16", "block_size": 32, "max_num_batched_tokens": 512}
        runner = make_runner(model, num_kv_blocks=None, **options)
        full, recent = runner.cache, runner.cache.recent
        assert recent is not None and runner.kv_groups[-1] == KVGroup(32, recent_blocks=recent.num_blocks)
        assert full.slabs.numel() == runner.num_kv_blocks * 148 * 32 * 2 * 4, "bytes a token, tokens, KV heads, layers"
        assert recent.nbytes == recent.num_blocks * 512 * 32 * 2 * 4 <= (16 << 20) / 4
        assert (16 << 20) - 148 * 32 * 2 * 4 < full.nbytes <= 16 << 20

    def test_warm_up_steps_run(self, folder: Path) -> None:
        runner = make_runner(folder, num_kv_blocks=2)
        for options in ({}, {"max_num_seqs": 200}, {"max_num_batched_tokens": 1}, {"max_num_seqs": 1}):
            config = self.config(**options)
            for step in kv_memory._warm_up_steps(config, len(runner.kv_groups), 50):
                assert step.num_tokens <= config.max_num_batched_tokens
                assert all(item.request.token_ids and item.start + item.num_tokens <= 50 for item in step.scheduled)
                assert len(runner.execute(step)) == len(step.scheduled) > 0
