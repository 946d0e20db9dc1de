"""Real interrupts (Ctrl-C) at random moments of an engine's work, in a process of its own."""

from __future__ import annotations

import os
import random
import signal
import time

from fake_runner import FakeRunner, FakeTokenizer, expected, fake_llm, greedy
from invariants import check_idle, run_out

from pagedattn.engine import LLM

TURNS = 50
PROMPTS = [[index, 5, 8, 13, 21, 34][: 2 + index % 5] for index in range(10)]


def interrupt(llm: LLM, seconds: float) -> None:
    """Generate until SIGINT comes after so many seconds, and again after 5 more where Python lost it in a finalizer."""
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)
        while True:
            llm.generate(PROMPTS, greedy(16), progress=False)
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main() -> None:
    """The tokens of another caller's request are right after each interrupt, and every block comes back."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
    draw = random.Random(9)
    llm = fake_llm(FakeRunner(24, swap_blocks=40, tokenizer=FakeTokenizer()), max_num_seqs=6)
    start = time.monotonic()
    llm.generate(PROMPTS, greedy(16), progress=False)
    duration, swaps, repairs = time.monotonic() - start, llm.stats().counters.swaps, 0
    for turn in range(TURNS):
        tokens, cache = [9, 9, turn], llm._scheduler.kv
        other, outputs = llm.add_request(tokens, greedy(60)), {}
        interrupt(llm, max(1e-6, draw.random() * duration))
        run_out(llm, outputs)
        assert outputs[other] == expected(tokens, greedy(60)), turn
        check_idle(llm)
        repairs += llm._scheduler.kv is not cache
    counters = llm.stats().counters
    assert repairs + counters.rollbacks > TURNS // 3 and counters.swaps > swaps, (repairs, counters)
