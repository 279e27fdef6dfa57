"""Sends KV blocks from one replica to another, over a separate socket to avoid delaying the frames with new tokens.

A block is as large as a thousand frames. A replica connects to a peer, sends the peer's secret, and asks for the blocks
of some tokens. The peer sends the blocks that it holds, in the format of a file (`folder.py`), and closes the
connection. For a model with recurrent layers, the peer first sends its longest snapshot, and then the blocks that this
snapshot covers.
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

from app.engine.block_store import Find
from app.engine.prefix import Prefix, Snapshot, label_of_snapshot
from app.engine.request import Address
from app.errors import described
from app.kv_tiers.folder import HEADER, header_of

logger = logging.getLogger(__name__)

# Timeout for connecting, and for each send and receive. A sequence stops waiting earlier and computes its blocks.
TIMEOUT_S = 1.0
ACCEPT_PAUSE_S = 0.5  # pause after a connection could not be accepted
MAX_SENT_AT_ONCE = 4  # prefixes sent concurrently; further connections are closed, and their replicas compute instead
MAX_REQUEST_BYTES = 16 << 20  # maximum size of an encoded `BlocksRequest`, enough for two million tokens

_LENGTH = struct.Struct(">I")

# Copies the last block of a prefix, or a snapshot, into the buffer. Returns whether the copy is valid.
Copy = Callable[[Prefix | Snapshot, memoryview], bool]


class Buffers(NamedTuple):
    """A buffer for a block and a buffer for a snapshot, which is empty if the model has no recurrent layers."""

    block: memoryview = memoryview(b"")
    snapshot: memoryview = memoryview(b"")

    def of(self, held: Prefix | Snapshot) -> memoryview:
        """Return the buffer for the last block of a prefix, or for a snapshot."""
        return self.block if isinstance(held, Prefix) else self.snapshot


def label_of(held: Prefix | Snapshot) -> tuple[int, ...]:
    """Return the numbers that identify a block (its token ids) or a snapshot (its label) outside KV memory."""
    return held.token_ids if isinstance(held, Prefix) else held.label


class BlocksRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request for the blocks of these tokens, except the first `num_before`. Fields are encoded by position."""

    namespace: bytes  # namespace of the receiver's KV memory
    salt: str
    token_ids: bytes  # 8 bytes per token
    num_before: int  # number of leading blocks that the replica already holds


class PeerServer:
    """Sends the prefixes in this replica's KV memory to other replicas, with one thread for each connection."""

    def __init__(
        self,
        host: str,
        *,
        namespace: bytes,
        new_buffers: Callable[[], Buffers],
        find: Find,
        copies: Callable[[], AbstractContextManager[Copy]],
    ) -> None:
        """`copies` opens a context for copying the prefixes that `find` returns, and their snapshots.

        Raises OSError if this machine does not have the address `host`.
        """
        self._namespace = namespace
        self._new_buffers = new_buffers
        self._find = find
        self._copies = copies
        self._secret = secrets.token_hex(16)
        self._free = BoundedSemaphore(MAX_SENT_AT_ONCE)
        self._closed = Event()
        self.num_sent = 0  # blocks sent so far
        self.num_snapshots_sent = 0
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, 0), family=family)
        self.address = Address(host, self._listening.getsockname()[1], self._secret)
        Thread(target=self._listen, name="kv-peers", daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections. Prefixes that are already being sent are sent completely."""
        self._closed.set()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread in `accept`
        self._listening.close()

    def _listen(self) -> None:
        has_failed = False
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError as error:  # the socket was closed, or this process currently has too many open files
                if not (has_failed or self._closed.is_set()):
                    logger.warning("could not accept a replica's connection for KV blocks; trying again: %s", error)
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
                if length > MAX_REQUEST_BYTES:
                    return
                wanted = msgspec.msgpack.decode(_received(connection, length), type=BlocksRequest)
                if wanted.namespace == self._namespace:
                    self._send(connection, wanted)
        except (
            OSError,
            EOFError,
            ValueError,
            msgspec.MsgspecError,
        ) as error:  # the last two if `BlocksRequest` is invalid
            logger.info("a prefix could not be sent completely: %s", described(error))
        finally:
            self._free.release()

    def _send(self, connection: socket.socket, wanted: BlocksRequest) -> None:
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
    """Return the longest prefix's snapshot, followed by its blocks, or an empty list if no prefix has a snapshot."""
    for number in range(len(found), 0, -1):
        snapshot = found[number - 1].snapshot
        if snapshot is not None:
            return [snapshot, *found[:number]]
    return []


class BlocksOfPeer:
    """Receives blocks from another replica, in order."""

    def __init__(self, address: Address, wanted: BlocksRequest) -> None:
        """Connect and send `wanted`. Raises OSError if the replica cannot be reached."""
        self._connection = socket.create_connection((address.host, address.port), timeout=TIMEOUT_S)
        self._wanted = wanted
        question = msgspec.msgpack.encode(wanted)
        with suppress(OSError):  # `read` reports a broken connection
            self._connection.sendall(address.secret.encode() + _LENGTH.pack(len(question)) + question)

    def read(self, token_ids: Sequence[int], content: memoryview) -> bool:
        """Fill the buffer with the next block. Returns False if the connection was closed or the block is invalid.

        Raises TimeoutError if the connection stays open but no data arrives.
        """
        try:
            header = _received(self._connection, HEADER.size + array("q").itemsize * len(token_ids))
            _receive(self._connection, content)
        except (EOFError, ConnectionError):
            return False
        return header == header_of(token_ids, content)

    def read_snapshot(self, block_size: int, content: memoryview) -> int:
        """Fill the buffer with the snapshot that precedes the blocks. Returns the number of tokens that it covers.

        Returns 0 if the connection was closed or the snapshot is invalid. Raises TimeoutError as `read` does.
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
        self._connection.close()


def _received(connection: socket.socket, num_bytes: int) -> bytes:
    data = bytearray(num_bytes)
    _receive(connection, memoryview(data))
    return bytes(data)


def _receive(connection: socket.socket, into: memoryview) -> None:
    """Receive bytes until the buffer is full. Raises EOFError if the connection closes first."""
    while into:
        num_bytes = connection.recv_into(into)
        if not num_bytes:
            raise EOFError
        into = into[num_bytes:]
