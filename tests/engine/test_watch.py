"""What the driver makes of ranks that answer, are slow, fail, die or hang; the ranks are processes without a model."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_rank
import pytest
import torch
from tiny_models import hf_config, hf_model, save

from pagedattn.engine import LLM
from pagedattn.engine.parallel.channel import Channel, Kind, packets
from pagedattn.engine.parallel.launcher import Workers
from pagedattn.engine.parallel.watch import Limits, RankFailed, WorkerMonitor
from pagedattn.errors import EngineDeadError, InvalidInputError, PagedAttnError, SecurityError, WeightsError

Make = Callable[..., WorkerMonitor]
LIMITS = Limits(silence=20.0, total=60.0)
LARGE = 1_000_000  # bytes; more than the sockets hold
# What ranks without a model say of it when they are started.
FACTS = {
    "num_kv_blocks": 9,
    "swap_config": [0, 0.0],
    "kv_groups": [[16, None]],
    "vocab_size": 512,
    "max_model_len": 64,
    "eos_token_ids": [],
    "description": "none",
}


def has_ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def fake_ranks(roles: Sequence[str], text: str = "ValueError") -> Iterator[None]:
    """TPGroup that are started are fake ones, of these roles in turn."""
    turn = iter(roles)

    class Popen(subprocess.Popen):
        def __init__(self, words: list[str], **options: Any) -> None:
            super().__init__([sys.executable, "-S", fake_rank.__file__, words[3], next(turn), text], **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Popen)
        yield


@pytest.fixture
def kept() -> list[Workers]:
    """What `make` has started, and ends."""
    return []


@pytest.fixture
def make(kept: list[Workers]) -> Iterator[Make]:
    """Watches over ranks of given roles; whatever became of them, nothing is left of them."""
    before = open_files()

    def start(*roles: str) -> WorkerMonitor:
        with fake_ranks(roles):
            kept.append(Workers(len(roles)))
        return WorkerMonitor(kept[-1])

    yield start
    for workers in kept:
        workers.stop()
        assert all(has_ended(process.pid) for process in workers.processes)
    assert open_files() == before


def ask(watch: WorkerMonitor, body: bytes, limits: Limits = LIMITS) -> list[bytes]:
    return watch.answers(watch.send(Kind.STEP, [body], limits), 2, limits)


def test_every_rank_gets_every_message(make: Make) -> None:
    watch = make("echo", "slow")
    for size in (0, 1, 32 << 10, (32 << 10) + 1, LARGE):
        body = random.Random(size).randbytes(size)
        assert ask(watch, body) == [body, body]
    number = watch.send(Kind.STEP, [b"one", b"other"], LIMITS)
    assert watch.answers(number, 2, LIMITS) == [b"one", b"other"]


def test_an_interrupt_anywhere_loses_and_doubles_nothing(make: Make) -> None:
    watch = make("echo", "echo")
    ask(watch, b"")
    draw, struck = random.Random(1), 0

    def strike(*_: object) -> None:
        raise KeyboardInterrupt

    old = signal.signal(signal.SIGALRM, strike)
    try:
        for turn in range(150):
            body = turn.to_bytes(4, "little") * draw.choice((1, 30_000))
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 1e-3))
                ask(watch, body)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                struck += 1
            assert ask(watch, body[::-1]) == [body[::-1]] * 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert struck > 20


def test_a_message_that_an_interrupt_kept_from_one_rank_reaches_it_before_the_next(make: Make) -> None:
    """Else one rank would run a step that the other does not, and wait for it for ever."""
    watch = make("echo", "echo")
    ask(watch, b"first")
    channel = watch._channels[1]
    offer = channel.offer

    def strike(_: bytes) -> bool:
        channel.offer = offer  # type: ignore[method-assign]
        raise KeyboardInterrupt

    channel.offer = strike  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        watch.send(Kind.STEP, [b"second"], LIMITS)
    kept_back = watch._number
    number = watch.send(Kind.STEP, [b"third"], LIMITS)
    assert watch.answers(kept_back, 2, LIMITS) == [b"second"] * 2
    assert watch.answers(number, 2, LIMITS) == [b"third"] * 2


@pytest.mark.parametrize(
    ("roles", "why"),
    [
        (("echo", "fail"), r"rank 1 of 2 .* failed: ValueError: the reason"),
        (("echo", "exit"), r"rank 1 of 2 .* ended with status 3"),
        (("fail", "exit"), r"rank 1 of 2 .* ended with status 3"),  # rank 0 only felt it
        (("mute", "echo"), r"rank 0 of 2 .* hangs: a step is not done after 1 s"),
        (("echo", "silent"), r"rank 1 of 2 .* hangs: no sign of life for 1 s"),
    ],
)
def test_a_lost_rank_is_named_with_its_cause(make: Make, roles: tuple[str, str], why: str) -> None:
    watch = make(*roles)
    ask(watch, b"first")
    start = time.monotonic()
    limits = Limits(1.0, 10.0) if "silent" in roles else Limits(10.0, 1.0)
    with pytest.raises(EngineDeadError, match=why) as caught:
        ask(watch, b"second", limits)
        ask(watch, b"third", limits)
    assert time.monotonic() - start < 3
    assert all(process.poll() is not None for process in watch._workers.processes)
    with pytest.raises(EngineDeadError, match=why):
        watch.send(Kind.STEP, [b""], LIMITS)
    if "fail" in roles and "exit" not in roles:
        assert "a trace" in str(caught.value.__cause__)


@pytest.mark.parametrize("size", [1, LARGE])
def test_a_killed_and_a_stopped_rank(make: Make, size: int) -> None:
    for number, why in ((signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "for 1 s, it is stopped")):
        watch = make("echo", "echo")
        ask(watch, b"first")
        os.kill(watch._workers.processes[1].pid, number)
        with pytest.raises(RankFailed, match=f"rank 1 .*{why}") as caught:
            ask(watch, bytes(size), Limits(1.0, 20.0))
        assert caught.value.rank == 1


def test_a_rank_that_lives_but_takes_no_messages(make: Make) -> None:
    watch = make("echo", "deaf")
    ask(watch, b"first")
    with pytest.raises(RankFailed, match=r"rank 1 .* hangs: it does not take what it is sent after 1 s"):
        watch.send(Kind.STEP, [bytes(LARGE)], Limits(10.0, 1.0))


@pytest.mark.parametrize(
    ("roles", "setting", "why"),
    [
        (("mute", "mute"), {"step_timeout": 0.5}, "hangs: a step is not done after 0.5 s"),
        (("mute", "silent"), {"heartbeat_timeout": 1.0}, "rank 1 of 2 .* hangs: no sign of life for 1 s"),
    ],
    ids=["step_timeout", "heartbeat_timeout"],
)
def test_the_settings_are_the_limits_of_a_step(
    roles: tuple[str, str], setting: dict[str, float], why: str, tmp_path: Path
) -> None:
    hf_config("qwen3", architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    with fake_ranks(roles, json.dumps(FACTS)):
        llm = LLM(tmp_path, tensor_parallel_size=2, device="cpu", **setting)
    start = time.monotonic()
    with pytest.raises(EngineDeadError, match=why):
        llm.generate([1, 2, 3])
    assert time.monotonic() - start < 5


@pytest.mark.parametrize("setting", ["start_timeout", "step_timeout"])
def test_ranks_that_load_have_the_longer_of_two_limits(setting: str, tmp_path: Path) -> None:
    hf_config("qwen3", architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    settings = {"start_timeout": 0.3, "step_timeout": 0.3, setting: 0.8}
    with fake_ranks(("loading", "loading")), pytest.raises(EngineDeadError, match=r"hangs: .* after 0\.8 s"):
        LLM(tmp_path, tensor_parallel_size=2, device="cpu", **settings)


def test_time_in_which_the_driver_was_stopped_is_not_silence(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """After ctrl-Z and fg, of driver and ranks, the clock has gone on and nobody has spoken."""
    watch = make("echo", "slow")
    ask(watch, b"first")
    number = watch.send(Kind.STEP, [b"second"], LIMITS)
    clock = time.monotonic
    jumps = iter([0.0, 3600.0])
    monkeypatch.setattr(time, "monotonic", lambda: clock() + next(jumps, 3600.0))
    assert watch.answers(number, 2, Limits(2.0, 5.0)) == [b"second"] * 2


def test_ranks_end_with_the_last_reference(make: Make, kept: list[Workers]) -> None:
    watch = make("echo", "echo")
    gone = weakref.ref(watch._workers)
    pids = [process.pid for process in watch._workers.processes]
    kept.clear()
    del watch
    gc.collect()
    assert gone() is None
    assert all(map(has_ended, pids))


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("WeightsError PagedAttnError ValueError", WeightsError, "rank 1: the reason"),
        ("UnsafePathError SecurityError WeightsError", SecurityError, "rank 1: the reason"),
        ("InvalidInputError ValueError|x|at most 3|4", InvalidInputError, "x must be at most 3, got 4"),
        ("KeyError LookupError", EngineDeadError, "rank 1 of 2 .* failed: KeyError: the reason"),
    ],
)
def test_what_a_rank_refuses_at_start_is_raised_as_it_was(
    text: str, kind: type[PagedAttnError], message: str, tmp_path: Path
) -> None:
    before = open_files()
    save(hf_model("qwen3", torch.float32), tmp_path)
    with fake_ranks(("mute", "refuse"), text), pytest.raises(kind, match=message) as caught:
        LLM(tmp_path, tensor_parallel_size=2, device="cpu")
    assert "a trace" in str(caught.value.__cause__)
    del caught
    assert open_files() == before


def test_packets_that_come_twice_or_not_at_all() -> None:
    one, other = Channel.pair()
    first, second = packets(Kind.STEP, 1, b"a" * 70_000), packets(Kind.STEP, 2, b"b" * 70_000)
    assert len(first) == 3
    whole = []
    for packet in (first[0], first[1], first[1], *second, second[2], *second, *first):
        assert one.offer(packet)
        whole += other.received()
    assert [(message.number, message.body) for message in whole] == [(2, b"b" * 70_000)]
    one.close()
    with pytest.raises(EOFError):
        next(other.received())
    other.close()
