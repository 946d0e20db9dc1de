"""Workers: the processes of all ranks, started with nothing but their sockets, and ended whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence

from pagedattn.errors import UnsupportedError

from .channel import Channel, Kind, packets

# Not multiprocessing's spawn: that runs the user's main module again, pickles, and keeps a process of its own.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); "
    "from pagedattn.engine.parallel.worker import main; main(int(sys.argv[1]), int(sys.argv[2]))"
)
_LAST = 2**32 - 1  # the number of a message after which there is none
# For a process to end by itself. No setting: one that waits for a step ends at once, and none has anything to save.
_SECONDS_TO_STOP = 2.0


class Workers:
    """One process per rank and the driver's end of its channel.

    The kernel kills a worker when the thread that started it ends, so a thread does that which ends with this object
    and not with the caller's.
    """

    def __init__(self, size: int) -> None:
        """Start `size` processes, which wait for their first message."""
        if sys.platform != "linux":
            raise UnsupportedError(f"tensor parallelism runs on Linux only, not on {sys.platform}; use 1")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.channels: list[Channel] = []
        # A file without a name, where the ranks meet: it goes when the last process that has it does.
        self._meeting = [os.memfd_create("pagedattn-ranks")]
        ended, started = threading.Event(), threading.Event()
        problems: list[BaseException] = []
        mine = (self.processes, self.channels, self._meeting, ended, os.getpid())
        self._finalizer = weakref.finalize(self, _end, *mine)
        args = (size, self._meeting[0], self.processes, self.channels, problems, started, ended)
        threading.Thread(target=_start_and_stay, args=args, name="pagedattn-workers", daemon=True).start()
        try:
            started.wait()
            if problems:
                raise problems[0]
        except BaseException:
            ended.set()
            started.wait()
            self.stop()
            raise

    @property
    def meeting_file(self) -> str:
        """A path of the ranks' common file, in each of them."""
        return f"/proc/self/fd/{self._meeting[0]}"

    def have_met(self) -> None:
        """Give up the common file, which every rank has open by now."""
        while self._meeting:
            os.close(self._meeting.pop())

    def stop(self) -> None:
        """End all processes: those that wait for a step by themselves, the others by force two seconds later."""
        self._finalizer()

    def kill(self) -> None:
        """End all processes at once."""
        for process in self.processes:
            process.kill()
        self.stop()


def _start_and_stay(
    size: int,
    meeting: int,
    processes: list[subprocess.Popen[bytes]],
    channels: list[Channel],
    problems: list[BaseException],
    started: threading.Event,
    ended: threading.Event,
) -> None:
    """Start the processes, then live as long as they should. Knows nothing that keeps the `Workers` alive."""
    # What a terminal sends to all is for the driver to act on; a process starts with the mask of who starts it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        for _ in range(size):
            if ended.is_set():
                return
            ours, theirs = Channel.pair()
            words = [sys.executable, "-c", _START, str(theirs.fileno()), str(os.getpid()), json.dumps(sys.path)]
            try:
                process = subprocess.Popen(words, stdin=subprocess.DEVNULL, pass_fds=(theirs.fileno(), meeting))
            finally:
                theirs.close()
            processes.append(process)
            channels.append(ours)
    except BaseException as error:
        problems.append(error)
    finally:
        started.set()
    ended.wait()


def _end(
    processes: Sequence[subprocess.Popen[bytes]],
    channels: Sequence[Channel],
    meeting: list[int],
    ended: threading.Event,
    owner: int,
) -> None:
    """Stop, then kill, then reap; not in a fork of the driver, which has copies of all this."""
    if os.getpid() != owner:
        return
    (stop,) = packets(Kind.STOP, _LAST)
    for channel in channels:
        try:
            channel.offer(stop)
        except OSError:
            continue
    deadline = time.monotonic() + _SECONDS_TO_STOP
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    for process in processes:
        try:
            process.wait(_SECONDS_TO_STOP)
        except subprocess.TimeoutExpired:  # in the kernel, which will let go of it; it is killed all the same
            continue
    for channel in channels:
        channel.close()
    while meeting:
        os.close(meeting.pop())
    ended.set()
