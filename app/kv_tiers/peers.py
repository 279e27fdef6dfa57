"""Blocks of KV from one replica to another, over a socket of their own: a block has the size of a thousand frames.

A replica asks for the prefix of some tokens and says the other's secret; the other sends the blocks that it holds, each
as in a file (`folder.py`), and closes the connection. Of a model with recurrent layers it sends its longest snapshot
first, then the blocks before the snapshot.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import struct
from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from threading import BoundedSemaphore, Event, Thread
from typing import NamedTuple

import msgspec

from app.engine.block_pool import Prefix
from app.engine.block_store import Find
from app.engine.request import Address
from app.engine.state_pool import Snapshot, label_of_snapshot
from app.errors import described
from app.kv_tiers.folder import HEADER, header_of

logger = logging.getLogger(__name__)

# Of connecting, and of each send and receive. A sequence that waits for blocks computes them after less.
TIMEOUT_S = 1.0
ACCEPT_PAUSE_S = 0.5  # until the next connection is taken after one could not be
MAX_SENT_AT_ONCE = 4  # prefixes; a replica that asks for more computes
MAX_WANTED_BYTES = 16 << 20  # of one question: two million tokens

_LENGTH = struct.Struct(">I")

# Copies the last block of a prefix, or a snapshot, into this buffer; says whether the copy is good.
Copy = Callable[[Prefix | Snapshot, memoryview], bool]


class Buffers(NamedTuple):
    """One buffer for a block and one for a snapshot. The second is empty where the model has no recurrent layers."""

    block: memoryview = memoryview(b"")
    snapshot: memoryview = memoryview(b"")

    def of(self, held: Prefix | Snapshot) -> memoryview:
        """The buffer for the last block of a prefix, or for a snapshot."""
        return self.block if isinstance(held, Prefix) else self.snapshot


def label_of(held: Prefix | Snapshot) -> tuple[int, ...]:
    """The numbers that stand before the bytes of a block or a snapshot outside the memory."""
    return held.token_ids if isinstance(held, Prefix) else held.label


class Wanted(msgspec.Struct, frozen=True, array_like=True):
    """The blocks of these tokens after the first `num_before`. It crosses processes: new fields go to the end."""

    namespace: bytes  # of the KV memory that they are for
    salt: str
    token_ids: bytes  # 8 bytes each
    num_before: int  # blocks


class PeerServer:
    """Gives other replicas the prefixes that are in this one's KV memory, by a thread for each that asks."""

    def __init__(
        self,
        host: str,
        *,
        namespace: bytes,
        new_buffers: Callable[[], Buffers],
        find: Find,
        copies: Callable[[], AbstractContextManager[Copy]],
    ) -> None:
        """copies: of prefixes that were found before, and of their snapshots.

        Raises OSError when this machine does not have that address.
        """
        self._namespace = namespace
        self._new_buffers = new_buffers
        self._find = find
        self._copies = copies
        self._secret = secrets.token_hex(16)
        self._free = BoundedSemaphore(MAX_SENT_AT_ONCE)
        self._closed = Event()
        self.num_sent = 0  # blocks, since the start
        self.num_snapshots_sent = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family)
        self.address = Address(host, self._listening.getsockname()[1], self._secret)
        Thread(target=self._listen, name="kv-peers", daemon=True).start()

    def close(self) -> None:
        """Take no more questions."""
        self._closed.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        self._listening.close()

    def _listen(self) -> None:
        has_failed = False
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError as error:  # it is closed, or this process has too many files open for the moment
                if not (has_failed or self._closed.is_set()):
                    logger.warning(
                        "the connection of a replica that asks for a prefix could not be accepted; trying again: %s",
                        error,
                    )
                has_failed = True
                self._closed.wait(ACCEPT_PAUSE_S)
                continue
            has_failed = False
            if self._free.acquire(blocking=False):
                Thread(target=self._answer, args=(connection,), name="kv-peer-writer", daemon=True).start()
            else:
                connection.close()

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(TIMEOUT_S)
        try:
            with connection:
                if not hmac.compare_digest(_received(connection, len(self._secret)), self._secret.encode()):
                    return
                (length,) = _LENGTH.unpack(_received(connection, _LENGTH.size))
                if length > MAX_WANTED_BYTES:
                    return
                wanted = msgspec.msgpack.decode(_received(connection, length), type=Wanted)
                if wanted.namespace == self._namespace:
                    self._send(connection, wanted)
        except (OSError, EOFError, ValueError, msgspec.MsgspecError) as error:  # the last two: it is no question
            logger.info("a prefix was not sent whole: %s", described(error))
        finally:
            self._free.release()

    def _send(self, connection: socket.socket, wanted: Wanted) -> None:
        buffers = self._new_buffers()
        found = self._find(array("q", wanted.token_ids), wanted.salt)[wanted.num_before :]
        with self._copies() as copy:
            for held in _with_snapshot(found) if buffers.snapshot else found:
                content = buffers.of(held)
                if not copy(held, content):
                    break
                connection.sendall(header_of(label_of(held), content))
                connection.sendall(content)
                self.num_sent += isinstance(held, Prefix)
                self.num_snapshots_sent += isinstance(held, Snapshot)


def _with_snapshot(found: Sequence[Prefix]) -> Sequence[Prefix | Snapshot]:
    """The longest snapshot of these prefixes, then the blocks before it; an empty list where there is none."""
    for number in range(len(found), 0, -1):
        snapshot = found[number - 1].snapshot
        if snapshot is not None:
            return [snapshot, *found[:number]]
    return []


class BlocksOfPeer:
    """The blocks that another replica sends for one question, in their order."""

    def __init__(self, address: Address, wanted: Wanted) -> None:
        """Ask. Raises OSError where it cannot be reached."""
        self._connection = socket.create_connection((address.host, address.port), timeout=TIMEOUT_S)
        self._wanted = wanted
        question = msgspec.msgpack.encode(wanted)
        with suppress(OSError):  # `read` tells
            self._connection.sendall(address.secret.encode() + _LENGTH.pack(len(question)) + question)

    def read(self, token_ids: Sequence[int], content: memoryview) -> bool:
        """Fill the buffer with the next block; False where no more come or it is not what it should be.

        Raises TimeoutError where nothing comes and the connection stays open.
        """
        try:
            header = _received(self._connection, HEADER.size + array("q").itemsize * len(token_ids))
            _receive(self._connection, content)
        except (EOFError, ConnectionError):
            return False
        return header == header_of(token_ids, content)

    def read_snapshot(self, block_size: int, content: memoryview) -> int:
        """Fill the buffer with the snapshot that comes before the blocks, and return behind how many tokens it is.

        Returns 0 where no snapshot comes or where it is damaged. Raises TimeoutError as `read` does.
        """
        try:
            header = _received(self._connection, HEADER.size + array("q").itemsize * (1 + block_size))
            _receive(self._connection, content)
        except (EOFError, ConnectionError):
            return 0
        num_tokens: int = array("q", header[HEADER.size :])[0]
        token_ids = array("q", self._wanted.token_ids)
        is_of_blocks = num_tokens % block_size == 0 and self._wanted.num_before * block_size < num_tokens
        if not is_of_blocks or num_tokens > len(token_ids):
            return 0
        label = label_of_snapshot(num_tokens, token_ids[num_tokens - block_size : num_tokens])
        return num_tokens if header == header_of(label, content) else 0

    def close(self) -> None:
        """Read no more."""
        self._connection.close()


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _receive(connection, memoryview(data))
    return bytes(data)


def _receive(connection: socket.socket, into: memoryview) -> None:
    """Raises EOFError where the other end closes the connection before."""
    while into:
        num_bytes = connection.recv_into(into)
        if not num_bytes:
            raise EOFError
        into = into[num_bytes:]
