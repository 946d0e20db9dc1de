"""A rank: a process that loads its share of a model and runs the steps that the driver sends, until it says stop.

Nothing of it outlives the driver: the kernel kills it when the driver dies, and it ends by itself when its socket does.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import astuple
from typing import Any, NoReturn

import torch

from pagedattn.errors import InvalidInputError

from ..config import EngineConfig
from ..garbage import freeze_while_alive
from ..models.tp_group import ProcessTPGroup
from ..sampling.sampler import AsyncTokens
from ..worker.runner import ModelRunner
from .channel import Channel, Kind, packets
from .step_wire import decode_step, encode_tokens

_SECONDS_PER_BEAT = 0.5
_PR_SET_PDEATHSIG = 1
_MAX_TEXT, _MAX_TRACE = 1000, 4000  # characters; with six bytes for each, a failure is still one packet


class Heartbeat(threading.Thread):
    """Says twice a second that this process is alive, or why it failed, and ends it when the driver is gone."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(daemon=True)
        self._channel = channel
        (self._packet,) = packets(Kind.BEAT, 0)
        self._now = threading.Event()

    def run(self) -> None:
        """Until the process ends."""
        hang_up = select.poll()
        hang_up.register(self._channel.fileno(), 0)
        while not hang_up.poll(0):
            try:
                self._channel.offer(self._packet)
            except OSError:
                break
            self._now.wait(_SECONDS_PER_BEAT)
        os._exit(1)

    def failed(self, error: BaseException) -> NoReturn:
        """Report an error, again and again, until the driver ends this process: peers may be waiting for it."""
        failure = {
            "kinds": [kind.__name__ for kind in type(error).__mro__],
            "fields": [error.param, error.expected, str(error.got)] if isinstance(error, InvalidInputError) else [],
            "text": str(error)[:_MAX_TEXT],
            "trace": "".join(traceback.format_exception(error))[-_MAX_TRACE:],
            "time": time.monotonic(),
        }
        (self._packet,) = packets(Kind.FAILED, 0, json.dumps(failure, ensure_ascii=False).encode("utf-8", "replace"))
        self._now.set()
        while True:
            time.sleep(_SECONDS_PER_BEAT)
            self._now.clear()


class _NoTerminal(io.TextIOWrapper):
    """Standard error of a rank that shows no progress bars: those of rank 0 stand for all."""

    def isatty(self) -> bool:
        return False


def main(descriptor: int, parent: int) -> None:
    """Serve the driver, process `parent`, whose other end of the socket `descriptor` is."""
    _die_with(parent)
    os.set_inheritable(descriptor, False)
    channel = Channel(socket.socket(fileno=descriptor))
    pulse = Heartbeat(channel)
    pulse.start()
    try:
        start = json.loads(channel.receive().body)
        runner = _load(channel, start)
        answers = ResponseThread(channel, pulse, tells=start["rank"] == 0)
        answers.start()
        _serve(channel, runner, answers)
    except BaseException as error:
        pulse.failed(error)


def _load(channel: Channel, start: dict[str, Any]) -> ModelRunner:
    """Meet the other ranks, load, and tell the driver what it must know."""
    device = torch.device(start["config"]["device"])
    if start["rank"]:
        sys.stderr = _NoTerminal(sys.stderr.buffer, line_buffering=True)
    if device.type == "cpu":
        torch.set_num_threads(start["threads"])
    ranks = ProcessTPGroup(start["rank"], start["size"], start["meeting_file"], device)
    runner = ModelRunner(EngineConfig(**start["config"]), ranks)
    freeze_while_alive(runner)
    facts = {
        "num_kv_blocks": runner.num_kv_blocks,
        "swap_config": astuple(runner.swap_config),
        "kv_groups": [
            [one.block_size, one.sliding_window, one.recent_blocks, one.window_blocks, one.first_blocks]
            for one in runner.kv_groups
        ],
        "vocab_size": runner.vocab_size,
        "max_model_len": runner.max_model_len,
        "eos_token_ids": list(runner.eos_token_ids),
        "description": runner.describe(),
    }
    channel.send(Kind.READY, 1, json.dumps(facts).encode())
    return runner


class ResponseThread(threading.Thread):
    """Waits for the tokens of launched steps, so that the next one can be launched meanwhile, and sends them.

    Rank 0 says what was sampled, the others, whose tokens are the same, that they are done.
    """

    def __init__(self, channel: Channel, pulse: Heartbeat, tells: bool) -> None:
        super().__init__(daemon=True)
        self._channel, self._pulse, self._tells = channel, pulse, tells
        self.launched: queue.SimpleQueue[tuple[int, AsyncTokens | None]] = queue.SimpleQueue()

    def run(self) -> None:
        """Until the process ends."""
        try:
            while True:
                number, drawn = self.launched.get()
                tokens = [] if drawn is None else drawn.read()
                self._channel.send(Kind.DONE, number, encode_tokens(tokens) if self._tells else b"")
        except BaseException as error:
            self._pulse.failed(error)


def _serve(channel: Channel, runner: ModelRunner, answers: ResponseThread) -> None:
    """Launch steps in the order in which they come."""
    while True:
        kind, number, body = channel.receive()
        if kind is Kind.STOP:
            sys.stdout.flush()
            sys.stderr.flush()
            # Taking NCCL and captured graphs apart can hang and gains nothing: the process is what holds them.
            os._exit(0)
        answers.launched.put((number, runner.launch_batch(decode_step(body))))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends, which is one that lives as long."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)
