"""Channel: messages between the driver and one rank, over a pair of sockets of their own.

The sockets keep packets apart and deliver each whole or not at all. A message is one packet or more, each with its
kind, the number of the message, and its place in it, so that a sender that was interrupted anywhere can send again: a
packet that has come before is passed over, and a message whose end never comes is dropped when the next one begins.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

_HEAD = struct.Struct("=BIII")  # kind, number, place, packets of the message
_BODY = 32 << 10  # far below the smallest limit of a packet
_PACKET = _HEAD.size + _BODY


class Kind(IntEnum):
    """What a message is. The first three go to a rank, the others come from it."""

    START = 1
    STEP = 2
    STOP = 3
    READY = 4
    DONE = 5
    FAILED = 6
    BEAT = 7


class Message(NamedTuple):
    """A message that has come whole."""

    kind: Kind
    number: int
    body: bytes


def packets(kind: Kind, number: int, body: bytes = b"") -> list[bytes]:
    """A message as packets. Numbers grow from message to message of a sender, those of BEAT and FAILED aside."""
    count = max(1, -(-len(body) // _BODY))
    cuts = (body[place * _BODY : (place + 1) * _BODY] for place in range(count))
    return [_HEAD.pack(kind, number, place, count) + cut for place, cut in enumerate(cuts)]


class Channel:
    """One end of a pair of sockets. May be sent to by several threads if all messages but one's are of one packet."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._parts: list[bytes] = []
        self._number = 0

    @classmethod
    def pair(cls) -> tuple[Channel, Channel]:
        """Two ends; neither is inherited by a child process unless it is passed on."""
        one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(one), cls(other)

    def fileno(self) -> int:
        """The descriptor, for polling."""
        return self.socket.fileno()

    def send(self, kind: Kind, number: int, body: bytes = b"") -> None:
        """Send a message and wait until it is all under way; OSError where the other end is gone."""
        for packet in packets(kind, number, body):
            self.socket.send(packet)

    def offer(self, packet: bytes) -> bool:
        """Send a packet without waiting; False where there is no room for it now."""
        try:
            self.socket.send(packet, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        return True

    def receive(self) -> Message:
        """Wait for the next message; EOFError where the other end is gone."""
        while True:
            message = self._take(self.socket.recv(_PACKET))
            if message is not None:
                return message

    def received(self) -> Iterator[Message]:
        """What has come by now, without waiting; EOFError after the last where the other end is gone."""
        while True:
            try:
                packet = self.socket.recv(_PACKET, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError as error:
                raise EOFError(str(error)) from error
            message = self._take(packet)
            if message is not None:
                yield message

    def close(self) -> None:
        """Give up this end."""
        self.socket.close()

    def _take(self, packet: bytes) -> Message | None:
        """The message that a packet completes, if it does."""
        if not packet:
            raise EOFError("the other end is closed")
        kind, number, place, count = _HEAD.unpack_from(packet)
        body = packet[_HEAD.size :]
        if kind in (Kind.BEAT, Kind.FAILED):
            return Message(Kind(kind), number, body)
        if number < self._number or (number == self._number and place != len(self._parts)):
            return None
        if number > self._number:
            self._number, self._parts = number, []
            if place:
                return None
        self._parts.append(body)
        return Message(Kind(kind), number, b"".join(self._parts)) if place + 1 == count else None
