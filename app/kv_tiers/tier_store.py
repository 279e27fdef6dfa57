"""Moves blocks between an engine's KV memory, a folder and other replicas, in separate threads.

For a model with recurrent layers, the store also moves snapshots of their states (see `StatePool`). In the folder, a
snapshot is an additional file next to its prefix's blocks. Between replicas, it is sent before the blocks.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from app.child_process import lower_priority
from app.config import GIB, TierConfig
from app.disk import STORAGE_PAUSE_S, may_pass
from app.engine.block_store import BlockStore, Fetch, Find, name_of, name_of_snapshot
from app.engine.model_runner import BlockCopies, BlockMemory
from app.engine.prefix import Prefix, Snapshot
from app.engine.request import Address, Request
from app.engine.stats import StoreStats
from app.errors import InvalidSetup, traceback_of
from app.kv_tiers.folder import BlockFolder
from app.kv_tiers.peers import BlocksOfPeer, BlocksRequest, Buffers, Copy, PeerServer, label_of

logger = logging.getLogger(__name__)

MEASUREMENT_TTL_S = 30.0  # how long a measured fetch time is used to predict later fetches
UNRESPONSIVE_PAUSE_S = 5.0  # how long an unresponsive replica is not asked again
RELIST_INTERVAL_S = 5.0  # how often the folder is listed to discover the blocks that other replicas have written
MAX_OFFERED = 100_000  # maximum number of prefixes waiting to be written; beyond it, the oldest are dropped
MIN_TOKENS = 512  # shorter prefixes are not stored: recomputing them is fast, and prefixes of chats are longer

ItemT = TypeVar("ItemT", Fetch, Prefix)
Memory = Callable[[], BlockMemory | None]  # returns the KV memory, or None while the engine has released it


class TierStore(BlockStore):
    """A block store backed by a folder and by other replicas.

    One thread reads files, and another reads from replicas. A third thread writes files. It has low priority, so it
    only runs when a core is idle. Writing pauses while the disk is full, and stops permanently if the folder is broken.
    """

    min_tokens = MIN_TOKENS

    def __init__(self, folder: BlockFolder | None, memory: Memory, *, namespace: bytes) -> None:
        """The KV memory must be available now: the first call of `memory` must not return None."""
        self.namespace = namespace
        self._folder = folder
        self._memory = memory
        first = memory()
        assert first is not None, "the memory is not released before the engine is built"
        self._block_bytes = first.block_bytes
        self._snapshot_bytes = 0 if first.states is None else first.states.block_bytes
        self._blocks_of_snapshot = -(-self._snapshot_bytes // self._block_bytes)  # a snapshot's size in blocks
        self._wake = threading.Condition()
        self._fetches: deque[Fetch] = deque()  # guarded by `_wake`, like the next seven attributes
        self._peer_fetches: deque[Fetch] = deque()  # fetches that may ask another replica
        self._offered: deque[Prefix] = deque(maxlen=MAX_OFFERED)
        self._in_progress: list[Fetch | Prefix] = []  # items from these queues that are being processed
        self._num_sending = 0  # blocks that are being copied for other replicas
        self._is_closed = False
        self._num_to_fetch: Counter[bool] = Counter()  # blocks left to fetch; True counts those in `_peer_fetches`
        self._paces: dict[Address | None, _Pace] = {}  # pace of the folder (None) and of each replica
        self._listed = threading.Event()
        self._paused_until = 0.0
        self._has_failed = False  # whether the last write failed
        self._peers: PeerServer | None = None
        self._unresponsive_until: dict[Address, float] = {}  # when each unresponsive replica may be asked again
        self.num_read = self.num_written = self.num_received = 0  # blocks so far
        self.num_snapshots_read = self.num_snapshots_written = self.num_snapshots_received = 0
        self._threads = [
            threading.Thread(target=self._read_all, args=(queue, self._new_buffers()), name=name, daemon=True)
            for queue, name in ((self._fetches, "kv-tier-reader"), (self._peer_fetches, "kv-peer-reader"))
        ]
        if folder is None:
            self._listed.set()
        else:
            self._threads.append(
                threading.Thread(
                    target=self._write_all, args=(folder, self._new_buffers()), name="kv-tier-writer", daemon=True
                )
            )
        for thread in self._threads:
            thread.start()

    def lookup(self, names: Iterable[bytes], request: Request, *, num_before: int) -> int:
        """See `BlockStore`. Counts all blocks of a resumed request: another replica may have just written them."""
        folder, elsewhere = self._folder, request.prefix_at
        num_of_peer = 0
        if elsewhere is not None and time.monotonic() >= self._unresponsive_until.get(elsewhere.address, -inf):
            num_of_peer = elsewhere.num_blocks - num_before
        if folder is None and num_of_peer <= 0:
            return 0
        found: list[bytes] = []
        for name in names:
            if len(found) >= num_of_peer and (folder is None or not (request.generated_token_ids or folder.has(name))):
                break
            found.append(name)
        if not self._snapshot_bytes or request.generated_token_ids or folder is None:
            return len(found)
        while len(found) > max(0, num_of_peer) and not folder.has(name_of_snapshot(found[-1])):
            found.pop()
        return len(found)

    def expected_s(self, num_blocks: int, request: Request) -> float:
        """See `BlockStore`. Includes the time for the fetches already queued for the same thread."""
        with self._wake:
            pace = self._paces.get(_address_of(request))
            if pace is None or not pace.is_recent:
                return 0.0
            num_before = self._num_to_fetch[request.prefix_at is not None]
            return pace.block_s * (num_blocks + self._blocks_of_snapshot + num_before)

    def begin(self, fetch: Fetch) -> None:
        with self._wake:
            self._num_to_fetch[fetch.request.prefix_at is not None] += len(fetch.blocks) + self._blocks_of_snapshot
            (self._fetches if fetch.request.prefix_at is None else self._peer_fetches).append(fetch)
            self._wake.notify_all()

    def offer(self, prefix: Prefix) -> None:
        if self._folder is None:
            return
        with self._wake:
            self._offered.append(prefix)
            if len(self._offered) == 1:
                self._wake.notify_all()

    def serve(self, host: str, find: Find) -> Address:
        if self._peers is None:
            self._peers = PeerServer(
                host, namespace=self.namespace, new_buffers=self._new_buffers, find=find, copies=self._copies_for_peer
            )
        return self._peers.address

    def settle(self, timeout_s: float) -> None:
        with self._wake:
            self._wake.wait_for(self._is_idle, timeout_s)

    def stats(self) -> StoreStats:
        return StoreStats(
            num_read=self.num_read,
            num_written=self.num_written,
            num_received=self.num_received,
            num_sent=0 if self._peers is None else self._peers.num_sent,
            block_bytes=self._block_bytes,
            num_snapshots=(
                self.num_snapshots_read,
                self.num_snapshots_written,
                self.num_snapshots_received,
                0 if self._peers is None else self._peers.num_snapshots_sent,
            ),
            snapshot_bytes=self._snapshot_bytes,
        )

    def wait_until_listed(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for the folder to be listed for the first time."""
        self._listed.wait(timeout_s)

    def close(self) -> None:
        with self._wake:
            self._is_closed = True
            self._wake.notify_all()
        if self._peers is not None:
            self._peers.close()
        for thread in self._threads:
            thread.join(timeout=1.0)  # a daemon thread that hangs in a file operation dies with the process

    def _is_idle(self) -> bool:
        """Whether no work is left. Unwanted fetches do not count, because they may hang (see `BlockMemory`)."""
        fetches = (*self._fetches, *self._peer_fetches, *self._in_progress)
        is_fetching = any(isinstance(each, Prefix) or each.is_wanted for each in fetches)
        return self._is_closed or not (self._offered or self._num_sending or is_fetching)

    # ------------------------------------------------------------------ the threads

    def _read_all(self, fetches: deque[Fetch], buffers: Buffers) -> None:
        while self._wait_for(fetches):
            with self._working(fetches) as fetch:
                if fetch is not None:
                    self._fetch(fetch, buffers)

    def _write_all(self, folder: BlockFolder, buffers: Buffers) -> None:
        lower_priority()  # write only when a core is idle, because the threads of a step wait for one another
        folder.refresh()
        self._listed.set()
        listed_at = time.monotonic()
        while self._wait_for(self._offered, RELIST_INTERVAL_S):
            with self._working(self._offered) as offered:
                if offered is not None:
                    self._write_prefix(folder, offered, buffers)
                if time.monotonic() - listed_at > RELIST_INTERVAL_S:
                    listed_at = time.monotonic()
                    folder.refresh()

    def _wait_for(self, queue: deque[Any], at_most_s: float | None = None) -> bool:
        """Wait up to `at_most_s` seconds for an item in the queue. Returns False if the store is closed."""
        with self._wake:
            self._wake.wait_for(lambda: queue or self._is_closed, at_most_s)
            return not self._is_closed

    @contextmanager
    def _working(self, queue: deque[ItemT]) -> Iterator[ItemT | None]:
        """Yield a queue's first item, or None. Logs errors, because fetches would never finish if the thread died."""
        with self._wake:
            item = queue.popleft() if queue else None
            taken = [] if item is None else [item]
            self._in_progress += taken
        try:
            yield item
        except Exception as error:
            logger.error("a KV block could not be read or written: %s", traceback_of(error))
        finally:
            with self._wake:
                for each in taken:
                    self._in_progress.remove(each)
                self._wake.notify_all()

    def _new_buffers(self) -> Buffers:
        """Return new buffers, which are empty if the engine has released the memory."""
        memory = self._memory()
        if memory is None:
            return Buffers()
        return Buffers(memory.new_buffer(), memoryview(b"") if memory.states is None else memory.states.new_buffer())

    @contextmanager
    def _copies(self) -> Iterator[BlockCopies | None]:
        """Open a context for copying blocks. Yields None if the engine has released the memory."""
        memory = self._memory()
        with nullcontext() if memory is None else memory.copies() as copies:
            yield copies

    def _fetch(self, fetch: Fetch, buffers: Buffers) -> None:
        peer: BlocksOfPeer | None = None
        num_covered_by_snapshot = 0  # blocks that the other replica's snapshot covers
        content = buffers.block
        try:
            with self._copies() as copies:
                if fetch.slot is not None and fetch.request.prefix_at is not None:
                    # Ask the replica before the folder, which may lack the last snapshot of a request that was moved.
                    peer, num_covered_by_snapshot = self._receive_snapshot(
                        fetch, fetch.request.prefix_at.address, buffers
                    )
                for block, name, token_ids in zip(fetch.blocks, fetch.names, fetch.token_ids, strict=True):
                    began_at = time.perf_counter()
                    if copies is None or not fetch.is_wanted:
                        break
                    source = None
                    if peer is None and self._read_from_folder(fetch, name, token_ids, content):
                        self.num_read += 1
                    elif fetch.request.prefix_at is None or (peer is None and fetch.slot is not None):
                        break
                    else:
                        source = fetch.request.prefix_at.address
                        peer = peer or self._connect_to_peer(fetch, source)
                        if not peer.read(token_ids, content):
                            break
                        self.num_received += 1
                    if not copies.put(block.block_id, content):
                        break
                    fetch.num_filled += 1
                    self._measure(source, time.perf_counter() - began_at)
                if fetch.slot is not None and copies is not None and fetch.is_wanted:
                    self._fill_slot(fetch, fetch.slot, copies, buffers.snapshot, num_received=num_covered_by_snapshot)
        except OSError as error:
            self._note_unresponsive(fetch, error)
        finally:
            if peer is not None:
                peer.close()
            with self._wake:
                self._num_to_fetch[fetch.request.prefix_at is not None] -= len(fetch.blocks) + self._blocks_of_snapshot
            num_usable = fetch.num_usable
            fetch.is_done = True
            if self._folder is not None and num_usable:
                minute, place = this_minute(), len(fetch.before)
                for place, name in enumerate(fetch.names[:num_usable], start=len(fetch.before) + 1):
                    self._folder.note_use(name, minute, place)
                if fetch.slot is not None:
                    self._note_use_of_snapshot(self._folder, fetch.names[num_usable - 1], minute, place)

    def _note_unresponsive(self, fetch: Fetch, error: OSError) -> None:
        """Record that a replica is gone or unresponsive, so that it is not asked again for a while."""
        if fetch.request.prefix_at is not None:
            now = time.monotonic()
            self._unresponsive_until = {at: until for at, until in self._unresponsive_until.items() if until > now}
            self._unresponsive_until[fetch.request.prefix_at.address] = now + UNRESPONSIVE_PAUSE_S
        logger.info("a prefix will be recomputed, because the replica that stores it did not send it: %s", error)

    def _receive_snapshot(self, fetch: Fetch, address: Address, buffers: Buffers) -> tuple[BlocksOfPeer | None, int]:
        """Fill the buffer with another replica's snapshot.

        Returns the connection, from which the blocks can then be read, and the number of the fetch's blocks that the
        snapshot covers. Returns None and 0 if the replica does not answer or holds no snapshot.
        """
        peer, num_tokens, block_size, began_at = None, 0, len(fetch.token_ids[0]), time.perf_counter()
        try:
            peer = self._connect_to_peer(fetch, address)
            num_tokens = peer.read_snapshot(block_size, buffers.snapshot)
        except OSError as error:
            self._note_unresponsive(fetch, error)
        if peer is not None and not num_tokens:
            peer.close()
        if peer is None or not num_tokens:
            return None, 0
        self.num_snapshots_received += 1
        self._measure(address, (time.perf_counter() - began_at) / self._blocks_of_snapshot)
        return peer, num_tokens // block_size - len(fetch.before)

    def _fill_slot(
        self, fetch: Fetch, slot: int, copies: BlockCopies, content: memoryview, *, num_received: int
    ) -> None:
        """Fill a fetch's slot with the last snapshot that covers only filled blocks.

        `num_received` is the number of blocks covered by a received snapshot in the buffer, or 0 without one.
        """
        number, began_at = num_received, time.perf_counter()
        if not 0 < number <= fetch.num_filled:
            number = fetch.num_filled
            while number and not self._read_snapshot(fetch, number, content):
                number -= 1
            if number:
                self.num_snapshots_read += 1
                self._measure(None, (time.perf_counter() - began_at) / self._blocks_of_snapshot)
        assert copies.states is not None, "the model has recurrent layers"
        if number and copies.states.put(slot, content):
            fetch.num_covered_by_snapshot = number

    def _read_snapshot(self, fetch: Fetch, num_blocks: int, content: memoryview) -> bool:
        """Fill the buffer with the snapshot after `num_blocks` blocks. Returns False if the folder has none."""
        name = name_of_snapshot(fetch.names[num_blocks - 1])
        return self._read_from_folder(fetch, name, fetch.label_after(num_blocks), content)

    def _read_from_folder(self, fetch: Fetch, name: bytes, token_ids: Sequence[int], content: memoryview) -> bool:
        return self._folder is not None and self._folder.read(name, fetch.request.tenant, token_ids, content)

    def _connect_to_peer(self, fetch: Fetch, address: Address) -> BlocksOfPeer:
        """Ask a replica for a fetch's unfilled blocks. Raises OSError if the replica cannot be reached."""
        request = fetch.request
        block_size, num_before = len(fetch.token_ids[0]), len(fetch.before)
        num_tokens = (num_before + len(fetch.blocks)) * block_size
        token_ids = array("q", (*request.prompt_token_ids, *request.generated_token_ids)[:num_tokens])
        wanted = BlocksRequest(self.namespace, request.prefix_salt, token_ids.tobytes(), num_before + fetch.num_filled)
        return BlocksOfPeer(address, wanted)

    def _measure(self, source: Address | None, seconds: float) -> None:
        """Record the time that it took to read one block from the folder (None) or another replica."""
        with self._wake:
            self._paces = {key: each for key, each in self._paces.items() if key is None or each.is_recent}
            self._paces.setdefault(source, _Pace()).note(seconds)

    def _write_prefix(self, folder: BlockFolder, prefix: Prefix, buffers: Buffers) -> None:
        """Write a prefix's missing blocks in order, and then its snapshot."""
        snapshot = prefix.snapshot
        if self._snapshot_bytes and snapshot is None:  # without the snapshot, the blocks are useless
            return
        missing: list[Prefix | Snapshot] = []
        if snapshot is not None and not folder.has(name_of_snapshot(name_of(prefix, self.namespace))):
            missing.append(snapshot)
        at: Prefix | str = prefix
        while isinstance(at, Prefix) and not folder.has(name_of(at, self.namespace)):
            missing.append(at)
            at = at.parent
        if missing:
            with self._copies() as copies:
                # Copy the snapshot first, because its slot may be reused while the blocks are being written.
                if isinstance(missing[0], Snapshot) and not _try_copy(missing[0], copies, buffers.snapshot):
                    return
                # Stop at a block that was evicted, because the later blocks are useless without it.
                while missing and time.monotonic() >= self._paused_until:
                    held = missing[-1]
                    if isinstance(held, Prefix) and not _try_copy(held, copies, buffers.block):
                        break
                    if not self._write(folder, held, buffers.of(held)):
                        break
                    missing.pop()
        if not missing:
            self._note_use(folder, prefix)
            if snapshot is not None:
                name = name_of(prefix, self.namespace)
                self._note_use_of_snapshot(folder, name, this_minute(), prefix.num_blocks)

    @staticmethod
    def _note_use_of_snapshot(folder: BlockFolder, name: bytes, minute: int, num_blocks: int) -> None:
        """Mark the snapshot of a prefix with this name and length as used. It will be deleted before the blocks."""
        folder.note_use(name_of_snapshot(name), minute, num_blocks + 1)

    def _note_use(self, folder: BlockFolder, prefix: Prefix) -> None:
        """Mark a prefix and its ancestors as used. Stops at the first ancestor already marked in this minute."""
        minute = this_minute()
        at: Prefix | str = prefix
        while isinstance(at, Prefix) and at.last_used_minute != minute:
            at.last_used_minute = minute
            folder.note_use(name_of(at, self.namespace), minute, at.num_blocks)
            at = at.parent

    def _write(self, folder: BlockFolder, held: Prefix | Snapshot, content: memoryview) -> bool:
        """Write the last block of a prefix, or a snapshot. Returns whether the file was written."""
        prefix = held.prefix if isinstance(held, Snapshot) else held
        name = name_of(prefix, self.namespace)
        name = name_of_snapshot(name) if isinstance(held, Snapshot) else name
        try:
            folder.write(name, prefix.tenant, label_of(held), content)
        except OSError as error:
            # FileNotFoundError does not mean that the folder is broken: another process deleted the file to make room.
            passes = may_pass(error) or isinstance(error, FileNotFoundError)
            self._paused_until = time.monotonic() + STORAGE_PAUSE_S if passes else inf
            if not self._has_failed or not passes:
                when = f"retrying every {STORAGE_PAUSE_S:.0f} s" if passes else "nothing more will be written"
                logger.warning("KV blocks cannot be written; %s: %s", when, error)
            self._has_failed = True
            return False
        if isinstance(held, Snapshot):
            self.num_snapshots_written += 1
        else:
            self.num_written += 1
        if self._has_failed:
            logger.info("KV blocks can be written again")
        self._has_failed = False
        return True

    @contextmanager
    def _copies_for_peer(self) -> Iterator[Copy]:
        with self._copies() as copies:

            def copy(held: Prefix | Snapshot, content: memoryview) -> bool:
                with self._wake:
                    self._num_sending += 1
                try:
                    return _try_copy(held, copies, content)
                finally:
                    with self._wake:
                        self._num_sending -= 1
                        self._wake.notify_all()

            yield copy


class _Pace:
    """The time to read a block from one source, as a moving average over recent fetches."""

    def __init__(self) -> None:
        self.block_s = 0.0
        self._measured_at = -inf

    @property
    def is_recent(self) -> bool:
        """Whether a fetch was measured recently. Old measurements are ignored, so that a slow source is tried again."""
        return time.monotonic() - self._measured_at <= MEASUREMENT_TTL_S

    def note(self, seconds: float) -> None:
        self.block_s += (seconds - self.block_s) * (0.1 if self.is_recent else 1.0)
        self._measured_at = time.monotonic()


def _address_of(request: Request) -> Address | None:
    """Return the replica that may hold the request's prefix, or None if only the folder may hold it."""
    return None if request.prefix_at is None else request.prefix_at.address


def _try_copy(held: Prefix | Snapshot, copies: BlockCopies | None, content: memoryview) -> bool:
    """Copy a prefix's last block, or a snapshot. Returns False if its block or slot was reused during the copy."""
    of_kind, place = (
        (copies, held.block.block_id) if isinstance(held, Prefix) else (copies and copies.states, held.slot)
    )
    return of_kind is not None and held.is_held and of_kind.take(place, content) and held.is_held


def this_minute() -> int:
    """Return the wall-clock time in whole minutes since 1970."""
    return int(time.time()) // 60


def open_folder(tier: TierConfig, *, namespace: bytes, block_bytes: int, snapshot_bytes: int = 0) -> BlockFolder | None:
    """Open the configured folder. Logs a warning and returns None if the folder is not writable.

    Raises:
        InvalidSetup: the path is a file, or `max_gib` is too small for one block or exceeds the file system's size.
    """
    path, max_bytes = Path(tier.path).expanduser(), int(tier.max_gib * GIB)
    if path.exists() and not path.is_dir():
        raise InvalidSetup(f"cache.tiers[0].path: {path} is a file; set a folder, or remove cache.tiers")
    needed, what = (block_bytes, "block") if block_bytes >= snapshot_bytes else (snapshot_bytes, "state snapshot")
    if needed > max_bytes:
        raise InvalidSetup(
            f"cache.tiers[0].max_gib: {tier.max_gib:g} is too small for one {what} of {needed / GIB:.3g} GiB; raise it"
        )
    try:
        folder = BlockFolder(path, namespace=namespace, max_bytes=max_bytes)
        disk_bytes = shutil.disk_usage(path).total
    except OSError as error:
        logger.warning("prefixes are stored only in KV memory, because cache.tiers[0].path is not writable: %s", error)
        return None
    if max_bytes > disk_bytes:
        raise InvalidSetup(
            f"cache.tiers[0].max_gib: got {tier.max_gib:g}, but the file system of {path} has only "
            f"{disk_bytes / GIB:.1f} GiB; lower it"
        )
    states = f", state snapshots of {snapshot_bytes / 1024:.0f} KiB" if snapshot_bytes else ""
    logger.info("prefixes are stored in %s: up to %g GiB, in blocks of %.0f KiB%s",
                path, tier.max_gib, block_bytes / 1024, states)  # fmt: skip
    return folder
