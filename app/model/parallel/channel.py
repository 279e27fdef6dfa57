"""Messages between rank 0 and another rank over a pair of sockets. Tensors go through the group instead."""

from __future__ import annotations

import json
import socket
import struct
import threading
from enum import IntEnum
from typing import Any

from app.errors import CarouselError, from_plain

_LENGTH = struct.Struct("<IB")  # the length of a message, and its kind


class Kind(IntEnum):
    """The kinds of messages."""

    SETTINGS = 0  # JSON: the settings for the load of a rank
    STEP = 1  # a step as `StepWriter` writes it
    SYNC = 2  # empty: the other rank answers with a SYNC when it has done all earlier messages
    PREPARE = 3  # empty: prepare for the first step, for example capture graphs
    FAILED = 4  # JSON: the error that ends the other rank, or the error of loading an adapter
    ADAPTER = 5  # JSON: a slot, and the file with a rank's part of an adapter; answered with a SYNC when it is loaded


class Channel:
    """One end of the pair of sockets. Any thread may send, and one thread reads messages."""

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
        """Wait for the next message and return it.

        Raises:
            CarouselError: the error that the other process ended with, or that it had with an adapter.
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
