"""Sends messages between rank 0 and another rank over a pair of sockets. Tensors use the `RankGroup` instead."""

from __future__ import annotations

import json
import socket
import struct
import threading
from enum import IntEnum
from typing import Any

from app.errors import CarouselError, from_plain

_LENGTH = struct.Struct("<IB")  # a message's length, then its kind


class Kind(IntEnum):
    """The kinds of messages, with their contents."""

    SETTINGS = 0  # JSON: the settings with which the rank loads its part of the model
    STEP = 1  # a step, encoded by `StepWriter`
    SYNC = 2  # empty; the rank answers with a SYNC when it has processed all earlier messages
    PREPARE = 3  # empty; asks the rank to prepare for its first step, for example to capture graphs
    FAILED = 4  # JSON: an error that ends the sender, or that loading an adapter raised
    ADAPTER = 5  # JSON: a slot, and a file with the rank's part of an adapter; answered with a SYNC once loaded


class Channel:
    """One end of the connection. Sending is thread-safe, but only one thread may receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._reader = end.makefile("rb")

    def send(self, kind: Kind, content: bytes = b"") -> None:
        """Send a message. Raises OSError if the other process has ended."""
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(content), kind) + content)

    def send_error(self, error: CarouselError) -> None:
        self.send(Kind.FAILED, json.dumps(error.to_plain(), default=str).encode())

    def receive(self) -> tuple[Kind, bytes]:
        """Wait for the next message and return its kind and content.

        Raises:
            CarouselError: the other process has sent this error, see `Kind.FAILED`.
            EOFError: the other process has ended.
        """
        head = self._read(_LENGTH.size)
        length, kind = _LENGTH.unpack(head)
        content = self._read(length)
        if kind == Kind.FAILED:
            name, message, attributes = json.loads(content)
            raise from_plain(name, message, attributes)
        return Kind(kind), content

    def _read(self, num_bytes: int) -> bytes:
        found = self._reader.read(num_bytes)
        if len(found) < num_bytes:
            raise EOFError("the other process has ended")
        return found

    def close(self) -> None:
        self._reader.close()
        self._socket.close()


def settings_of(content: bytes) -> Any:
    return json.loads(content)
