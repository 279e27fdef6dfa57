"""What rank 0 and another rank say to each other beside tensors: messages over a pair of sockets."""

from __future__ import annotations

import json
import socket
import struct
import threading
from enum import IntEnum
from typing import Any

from app.errors import CarouselError, from_plain

_LENGTH = struct.Struct("<IB")  # of the message, and its kind


class Kind(IntEnum):
    """What a message is."""

    SETTINGS = 0  # JSON: what a rank is to load
    STEP = 1  # see `StepWriter`
    SYNC = 2  # empty; the other rank answers with the same once it has done all before it
    PREPARE = 3  # empty: do what the first step would have to do otherwise
    FAILED = 4  # JSON: the error that ends the other rank, or which an adapter had
    ADAPTER = 5  # JSON: a slot, and the file with a rank's part of an adapter; answered with a SYNC once it is there


class Channel:
    """One end. Any thread may send; messages are read by one thread."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()
        self._reader = end.makefile("rb")

    def send(self, kind: Kind, content: bytes = b"") -> None:
        """Raises OSError if the other process has ended."""
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(content), kind) + content)

    def send_error(self, error: CarouselError) -> None:
        self.send(Kind.FAILED, json.dumps(error.to_plain(), default=str).encode())

    def receive(self) -> tuple[Kind, bytes]:
        """Wait for the next message.

        Raises:
            CarouselError: the error that the other process ended with.
            EOFError: it has ended.
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
