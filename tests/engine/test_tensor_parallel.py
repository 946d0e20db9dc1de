"""Two ranks over gloo give the tokens of one, and when one of them is lost nothing hangs and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import random_work
import torch
from rank_pair import GREEDY, LIMIT, MODELS, Pair, left_behind, prompts, tokens
from test_watch import has_ended, open_files
from tiny_models import hf_model, save

from pagedattn.engine import LLM, SamplingParams
from pagedattn.engine.parallel import launcher
from pagedattn.errors import EngineDeadError, RequestError, UnsupportedError


@pytest.fixture(scope="module", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        folder = str(tmp_path_factory.mktemp("temporary"))
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield


@pytest.fixture(scope="module")
def made() -> Iterator[dict[str, Pair]]:
    """The pairs of this module, by name."""
    pairs: dict[str, Pair] = {}
    yield pairs
    for one in pairs.values():
        one.two.close()
        one.check_nothing_is_left()


@pytest.fixture
def pair(made: dict[str, Pair], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """Pairs by name, made anew where an earlier test has lost a rank."""

    def get(name: str) -> Pair:
        if name not in made or not made[name].lives:
            made[name] = Pair(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_one_rank(name: str, pair: Callable[[str], Pair]) -> None:
    """Chunked, with a prefix cache, cold and hot, preempted for lack of blocks; serial, and overlapped with swap."""
    both = pair(name)
    for _ in range(2):
        assert tokens(both.two, GREEDY) == tokens(both.one, GREEDY)
    one, two = both.one.stats(), both.two.stats()
    assert two.counters == one.counters
    assert two.counters.preemptions > 0 and two.counters.cached_tokens > 0
    assert (two.counters.swapped_in_blocks > 0) == (name == "llama")
    assert both.two._loop.overlap == (name == "llama")
    assert two.counters.steps > 2 * 40 // 12 and two.num_free_blocks == two.num_blocks


@pytest.mark.parametrize("name", [pytest.param("int4", marks=pytest.mark.grid), "turboquant4:window=32"])
def test_both_ranks_keep_open_blocks(name: str, tmp_path: Path) -> None:
    """Of which each rank has its heads' part in both caches: chunked, forked, preempted and hit."""
    folder = save(hf_model("qwen3", torch.float32, num_hidden_layers=2), tmp_path)
    options = {"kv_cache_dtype": name, "dtype": "float64", "device": "cpu", "num_kv_blocks": 8, "max_num_seqs": 4}
    options |= {"block_size": 32, "max_num_batched_tokens": 48, "graph_sizes": (2, 4), "preemption": "recompute"}
    draw = torch.Generator().manual_seed(1)
    first, second, third = (torch.randint(3, 500, (length,), generator=draw).tolist() for length in (70, 29, 13))
    asked = [first, second, [*first[:64], *third]]
    params = [SamplingParams(temperature=1.0, seed=3, n=n, max_tokens=50, ignore_eos=True) for n in (1, 2, 1)]
    found = []
    for size in (1, 2):
        llm = LLM(folder, tensor_parallel_size=size, **options)
        outputs = [one for _ in range(2 if random_work.everything else 1) for one in llm.generate(asked, params)]
        found.append([[one.token_ids for one in output.outputs] for output in outputs])
        stats = llm.stats()
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.counters.preemptions > 0 and stats.counters.cached_tokens > 0
        llm.close()
    assert found[0] == found[1]


def test_images_are_refused_as_by_one_rank(pair: Callable[[str], Pair]) -> None:
    both = pair("qwen3")
    for llm in (both.one, both.two):
        with pytest.raises(RequestError, match="token 500 at index 1, which stands for an image"):
            llm.generate([5, 500])


def test_sampled_tokens_and_their_probabilities(pair: Callable[[str], Pair]) -> None:
    """Parameters, seeds and tokens so far reach the ranks: penalties, forks, min_tokens, stop ids, logprobs."""
    both = pair("qwen3")
    params = SamplingParams(
        temperature=0.9,
        top_k=40,
        top_p=0.95,
        seed=7,
        n=2,
        max_tokens=8,
        min_tokens=3,
        stop_token_ids=[*range(0, 500, 7)],
        repetition_penalty=1.2,
        frequency_penalty=0.3,
        logprobs=2,
    )
    one, two = both.one.generate(prompts(), params), both.two.generate(prompts(), params)
    lengths = set()
    for a, b in zip(one, two, strict=True):
        for c, d in zip(a.outputs, b.outputs, strict=True):
            assert (c.token_ids, c.finish_reason) == (d.token_ids, d.finish_reason)
            assert c.logprobs == pytest.approx(d.logprobs, abs=1e-5)
            lengths.add((len(c.token_ids), c.finish_reason))
    assert {reason for _, reason in lengths} == {"stop", "length"}


@pytest.mark.parametrize("name", MODELS)
def test_interrupts_leave_the_engine_usable(name: str, pair: Callable[[str], Pair]) -> None:
    both, struck = pair(name), 0
    want = tokens(both.one, GREEDY)

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, strike)
    try:
        for delay in range(12):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.01 + 0.007 * delay)
                both.two.generate(prompts(), GREEDY)
            except KeyboardInterrupt:
                struck += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.signal(signal.SIGALRM, old)
    assert struck > 8
    assert tokens(both.two, GREEDY) == want
    assert both.two.stats().cache_use == 0


@pytest.mark.parametrize("lost", [0, 3])
def test_a_step_that_was_never_sent_is_not_built_upon(
    lost: int, pair: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair("qwen3")
    watch = both.two.runner._watch  # type: ignore[attr-defined]
    send, calls = watch.send, iter(range(1000))

    def interrupted(*message: object) -> int:
        if next(calls) == lost:
            raise KeyboardInterrupt
        return send(*message)

    monkeypatch.setattr(watch, "send", interrupted)
    names = [both.two.add_request(prompt, GREEDY) for prompt in prompts()]
    outputs = {}
    with pytest.raises(KeyboardInterrupt):
        while both.two.has_unfinished:
            outputs |= {output.request_id: output for output in both.two.step()}
    while both.two.has_unfinished:
        outputs |= {output.request_id: output for output in both.two.step()}
    assert [[outputs[name].token_ids] for name in names] == tokens(both.one, GREEDY)


def test_an_interrupt_of_a_terminal_is_for_the_driver_only(pair: Callable[[str], Pair]) -> None:
    both = pair("qwen3")
    for pid in both.pids:
        os.kill(pid, signal.SIGINT)
    assert tokens(both.two, GREEDY) == tokens(both.one, GREEDY)


def test_ranks_listen_on_loopback_only(pair: Callable[[str], Pair]) -> None:
    inodes = set()
    for pid in pair("qwen3").pids:
        for one in os.listdir(f"/proc/{pid}/fd"):
            inodes.add(os.readlink(f"/proc/{pid}/fd/{one}").removeprefix("socket:[").rstrip("]"))
    addresses = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text(encoding="utf-8").splitlines()[1:]:
            words = line.split()
            if words[9] in inodes and words[3] == "0A":  # listens
                addresses.append(words[1].partition(":")[0])
    assert set(addresses) == {"0100007F"}


def test_ranks_that_were_suspended_for_seconds_go_on(pair: Callable[[str], Pair]) -> None:
    """As on a host that was paused, or that had too much else to do."""
    both, outputs = pair("qwen3"), []
    for output in both.two.stream(prompts(), GREEDY):
        if not outputs:
            for pid in both.pids:
                os.kill(pid, signal.SIGSTOP)
                threading.Timer(4.0, os.kill, (pid, signal.SIGCONT)).start()
        outputs.append(output)
    ended = sorted((delta.prompt_index, delta.completion.token_ids) for delta in outputs if delta.completion)
    assert [[ids] for _, ids in ended] == tokens(both.one, GREEDY)


# From here on ranks are lost: who comes later needs new ones.
def test_a_killed_rank(pair: Callable[[str], Pair]) -> None:
    assert "was killed by SIGKILL" in pair("qwen3").lose(signal.SIGKILL)


def test_a_stopped_rank(pair: Callable[[str], Pair]) -> None:
    assert "hangs: no sign of life for 8 s, it is stopped" in pair("llama").lose(signal.SIGSTOP, 8 + LIMIT)


def test_an_error_in_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 raises while rank 0 is in the middle of the same step."""
    save(hf_model("qwen3", torch.float32), tmp_path)
    fault = """
from pagedattn.engine.worker.runner import ModelRunner
real, steps = ModelRunner.launch_batch, iter(range(100))
def launch_batch(self, step):
    if self.model._ranks.rank == 1 and next(steps) == 5:
        raise ZeroDivisionError("the reason")
    return real(self, step)
ModelRunner.launch_batch = launch_batch
"""
    plant = f"exec({fault!r}); from pagedattn.engine.parallel.worker"
    monkeypatch.setattr(launcher, "_START", launcher._START.replace("from pagedattn.engine.parallel.worker", plant))
    before = open_files()
    llm = LLM(tmp_path, tensor_parallel_size=2, device="cpu", num_kv_blocks=64, dtype="float64")
    pids = [process.pid for process in llm.runner._workers.processes]  # type: ignore[attr-defined]
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=r"rank 1 of 2 .* failed: ZeroDivisionError: the reason") as caught:
        llm.generate(prompts(), GREEDY)
    assert time.monotonic() - start < LIMIT
    assert "in launch" in str(caught.value.__cause__)
    assert all(map(has_ended, pids)) and open_files() == before


def test_ranks_die_with_their_driver(tmp_path: Path) -> None:
    """The driver is killed while one rank is stopped, and the engine was made by a thread that has ended."""
    save(hf_model("qwen3", torch.float32), tmp_path)
    script = f"""
import os, signal, threading
from pagedattn.engine import LLM
made = []
options = dict(tensor_parallel_size=2, device="cpu", num_kv_blocks=64)
thread = threading.Thread(target=lambda: made.append(LLM({str(tmp_path)!r}, **options)))
thread.start(); thread.join()
made[0].generate([1, 2, 3])
pids = [process.pid for process in made[0].runner._workers.processes]
os.kill(pids[0], signal.SIGSTOP)
print(*pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    before = left_behind()
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=120)
    pids = [int(word) for word in done.stdout.split()]
    assert done.returncode == -signal.SIGKILL and len(pids) == 2
    deadline = time.monotonic() + LIMIT
    while not all(map(_is_dead, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert all(map(_is_dead, pids))
    assert left_behind() <= before


def _is_dead(pid: int) -> bool:
    """Gone, or a zombie that whoever adopts orphans here has not reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_what_cannot_be_cut_is_refused_before_a_process_starts(tmp_path: Path) -> None:
    save(hf_model("qwen3", torch.float32), tmp_path)
    with pytest.raises(UnsupportedError, match=r"tensor_parallel_size=3.*4 attention heads; possible: \[1, 2, 4\]"):
        LLM(tmp_path, tensor_parallel_size=3, device="cpu")
    with pytest.raises(UnsupportedError, match="cuda"):
        LLM(tmp_path, tensor_parallel_size=2, device="cuda:63")
