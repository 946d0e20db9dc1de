"""WorkerMonitor: what the driver hears from its ranks, and the verdict when one of them dies, fails or falls silent."""

from __future__ import annotations

import json
import select
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

from pagedattn.errors import EngineDeadError, PagedAttnError

from .channel import Kind, packets
from .launcher import Workers

_TICK = 0.25
_GRACE = 0.3  # what follows from a failure elsewhere arrives within this of it


class Limits(NamedTuple):
    """Seconds after which a rank counts as hung.

    Attributes:
        silence: without any sign of life.
        total: for taking a message, or answering it, although there are signs of life.
    """

    silence: float
    total: float


class RankFailed(EngineDeadError):
    """A rank died, failed or hung. `failure` is what it said of its error, None where it raised none."""

    def __init__(self, message: str, rank: int, failure: dict[str, Any] | None = None) -> None:
        self.rank, self.failure = rank, failure
        super().__init__(message)


class WorkerMonitor:
    """Sends messages to all ranks, waits for their answers, and ends all of them as soon as one is lost.

    An interrupt may strike anywhere: what was not sent is sent by the next `send`, before anything else, so that all
    ranks get the same messages; what was received and lost was an answer to a request that was given up.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._channels, self._processes = workers.channels, workers.processes
        self._size = len(self._channels)
        self._poll = select.poll()
        self._rank_of = {channel.fileno(): rank for rank, channel in enumerate(self._channels)}
        for channel in self._channels:
            self._poll.register(channel.fileno(), select.POLLIN)
        self._unsent: list[list[bytes]] = [[] for _ in self._channels]
        self._number = 0
        self._answers: list[dict[int, bytes]] = [{} for _ in self._channels]
        self._latest = [0] * self._size
        self._silent = [0.0] * self._size  # seconds, of those in which this process was awake and listened
        self._gone: set[int] = set()
        self._failures: dict[int, dict[str, Any]] = {}
        self.dead: RankFailed | None = None

    def send(self, kind: Kind, bodies: list[bytes], limits: Limits) -> int:
        """Send each rank its body (one for all where there is one); returns the number by which they answer.

        Raises:
            RankFailed: a rank is lost, or does not take what it is sent; all of them have been ended.
        """
        self._check()
        self._silent = [0.0] * self._size
        self._flush(limits)
        number = self._number = self._number + 1
        whole = [packets(kind, number, body) for body in bodies]
        self._unsent = [list(reversed(whole[rank % len(whole)])) for rank in range(self._size)]
        self._flush(limits)
        return number

    def answers(self, number: int, ranks: int, limits: Limits) -> list[bytes]:
        """What the first `ranks` ranks answer to a message.

        Raises:
            RankFailed: a rank is lost; all of them have been ended.
        """
        self._check()
        left = limits.total
        while any(self._latest[rank] < number for rank in range(ranks)):
            left -= self._listen(_TICK, limits.silence)
            if left < 0:
                late = next(rank for rank in range(self._size) if self._latest[rank] < number)
                raise self._lost(late, f"hangs: a step is not done after {limits.total:g} s")
        found = [self._answers[rank].pop(number, b"") for rank in range(ranks)]
        for kept in self._answers:
            for old in [key for key in kept if key < number]:
                del kept[old]
        return found

    def _flush(self, limits: Limits) -> None:
        """Send what is unsent. A packet is taken off the list after it went: one sent twice is passed over."""
        left = limits.total
        for rank, unsent in enumerate(self._unsent):
            channel = self._channels[rank]
            while unsent:
                try:
                    sent = channel.offer(unsent[-1])
                except OSError:
                    self._gone.add(rank)
                    raise self._diagnosed() from None
                if sent:
                    unsent.pop()
                    continue
                left -= self._wait_for_room(rank, limits.silence)
                if left < 0:
                    raise self._lost(rank, f"hangs: it does not take what it is sent after {limits.total:g} s")

    def _wait_for_room(self, rank: int, silence: float) -> float:
        """As `_listen`, until a rank's channel may take a packet."""
        descriptor = self._channels[rank].fileno()
        self._poll.modify(descriptor, select.POLLIN | select.POLLOUT)
        try:
            return self._listen(_TICK, silence)
        finally:
            if descriptor in self._rank_of:
                self._poll.modify(descriptor, select.POLLIN)

    def _listen(self, seconds: float, silence: float) -> float:
        """Take in what comes within `seconds`; returns for how long this process listened, were it not stopped.

        Raises:
            RankFailed: a rank is lost, or gave no sign of life for `silence` seconds.
        """
        waited = self._take_in(seconds)
        if self._gone or self._failures:
            raise self._diagnosed()
        for rank, quiet in enumerate(self._silent):
            if quiet > silence:
                state = _state(self._processes[rank].pid)
                raise self._lost(rank, f"hangs: no sign of life for {silence:g} s{state}")
        return waited

    def _take_in(self, seconds: float) -> float:
        start, heard = time.monotonic(), set()
        for descriptor, _ in self._poll.poll(seconds * 1000):
            rank = self._rank_of[descriptor]
            try:
                for message in self._channels[rank].received():
                    heard.add(rank)
                    if message.kind is Kind.FAILED:
                        self._failures.setdefault(rank, json.loads(message.body))
                    elif message.kind is not Kind.BEAT:
                        self._answers[rank][message.number] = message.body
                        self._latest[rank] = message.number
            except EOFError:
                self._gone.add(rank)
                self._poll.unregister(descriptor)
                del self._rank_of[descriptor]
        waited = min(time.monotonic() - start, seconds)
        self._silent = [0.0 if rank in heard else quiet + waited for rank, quiet in enumerate(self._silent)]
        return waited

    def _diagnosed(self) -> RankFailed:
        """The verdict on a loss: a dead rank is the cause of errors in others, of errors the first one is."""
        deadline = time.monotonic() + _GRACE
        while not self._gone and (left := deadline - time.monotonic()) > 0:
            self._take_in(left)
        if self._gone:
            rank = min(self._gone)
            return self._lost(rank, _ending(self._processes[rank]))
        rank = min(self._failures, key=lambda rank: self._failures[rank]["time"])
        failure = self._failures[rank]
        cause = PagedAttnError(f"rank {rank} raised this:\n{failure['trace']}")
        return self._lost(rank, f"failed: {failure['kinds'][0]}: {failure['text']}", failure, cause)

    def _lost(
        self, rank: int, what: str, failure: dict[str, Any] | None = None, cause: Exception | None = None
    ) -> RankFailed:
        """End all ranks and say why, now and to everyone who asks later."""
        process = self._processes[rank]
        self._workers.kill()
        message = f"rank {rank} of {self._size} (process {process.pid}) {what}; make a new engine"
        self.dead = RankFailed(message, rank, failure)
        self.dead.__cause__ = cause
        return self.dead

    def _check(self) -> None:
        if self.dead is not None:
            raise RankFailed(str(self.dead), self.dead.rank, self.dead.failure) from self.dead.__cause__


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "closed its connection"
    names = {one.value: one.name for one in signal.Signals}
    return f"was killed by {names.get(-code, f'signal {-code}')}" if code < 0 else f"ended with status {code}"


def _state(pid: int) -> str:
    """A process's state where it explains silence."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return ""
    return {"T": ", it is stopped", "t": ", it is held by a debugger", "D": ", it waits in the kernel"}.get(letter, "")
