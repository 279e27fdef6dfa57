"""Fetches prefixes from a store (`BlockStore`), and tracks the sequences that are waiting for a fetch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from app.engine.block_pool import BlockPool
from app.engine.block_store import BlockStore, Fetch, name_after, name_of, root_name
from app.engine.prefix import Block, Prefix
from app.engine.request import Address
from app.engine.sequence import EngineSequence, SequenceStatus
from app.engine.stats import StoreStats

# How often an idle engine checks fetches that sequences wait for, and abandoned fetches whose blocks are not yet free.
POLL_WAITING_S, POLL_ABANDONED_S = 0.001, 0.1
# A fetch may take as long as computing the tokens would, but at least `MIN_PATIENCE_S`. While the engine's speed is
# unknown, it may take `FIRST_PATIENCE_S`.
MIN_PATIENCE_S, FIRST_PATIENCE_S = 0.05, 1.0


@dataclass(slots=True, eq=False)
class _PendingFetch:
    sequence: EngineSequence | None  # waits for the fetch; None if it has ended or computes the tokens instead
    arrival: int  # the sequence's arrival number
    parent: Prefix | str  # the parent of the first fetched block
    fetch: Fetch  # its blocks, and the cached blocks before them, must not be freed until the fetch is done
    began_at: float
    abandon_at: float
    is_void: bool = False  # whether the engine has released the memory that the fetch fills


class PrefixFetches:
    """Lets a store fill blocks for the first waiting sequence, if this is faster than computing them.

    Filled blocks become free blocks that are cached in the pool like any others. The sequence returns to the queue and
    finds them in the pool when it joins. Without a store, nothing is fetched.
    """

    def __init__(self, pool: BlockPool, store: BlockStore | None) -> None:
        self._pool = pool
        self.store = store
        self._expected: list[_PendingFetch] = []
        # Fetches that began and fetches that finished since the last `take_notes`: (arrival number, number of blocks).
        self._begun: list[tuple[int, int]] = []
        self._done: list[tuple[int, int]] = []
        self.num_tokens = 0  # tokens fetched so far
        self.num_given_up = 0  # fetches so far that took too long
        if store is not None and pool.states is not None:
            pool.states.on_durable_snapshot = self._offer_long
        elif store is not None:
            pool.on_cached = self._offer_long

    def _offer_long(self, prefix: Prefix) -> None:
        """Offer a newly computed prefix unless it is short, because short ones are cheap and rarely requested again."""
        assert self.store is not None
        if prefix.num_blocks * self._pool.block_size >= self.store.min_tokens:
            self.store.offer(prefix)

    def serve(self, host: str) -> Address | None:
        """See `BlockStore.serve`. Thread-safe."""
        return None if self.store is None else self.store.serve(host, self._pool.find)

    def stats(self) -> StoreStats | None:
        """Return the store's statistics, or None without a store. Thread-safe."""
        if self.store is None:
            return None
        return self.store.stats()._replace(num_fetched_tokens=self.num_tokens, num_given_up=self.num_given_up)

    def __len__(self) -> int:
        """Return the number of sequences that are waiting for a fetch."""
        return sum([each.sequence is not None for each in self._expected])

    def due_at(self, now: float) -> float | None:
        """Return when to check the fetches again, or None if no fetch is in progress."""
        if not self._expected:
            return None
        if any(each.fetch.is_done for each in self._expected):
            return now
        return now + (POLL_WAITING_S if len(self) else POLL_ABANDONED_S)

    def begin(self, sequence: EngineSequence, cached: list[Block], *, now: float, tokens_per_s: float) -> bool:
        """Fetch the blocks that follow a sequence's cached blocks. Returns whether the sequence must wait for a fetch.

        cached: the blocks that the sequence would share if it joined now. tokens_per_s: the engine's speed, or 0 if
        unknown. The pool must have free blocks for all of the sequence's tokens.
        """
        store = self.store
        if store is None or sequence.fetch_epoch == sequence.epoch:
            return False
        sequence.fetch_epoch = sequence.epoch  # fetch only once, even if fetched blocks are evicted before it joins
        parent = sequence.request.prefix_salt if not cached else cached[-1].prefix
        assert parent is not None, "a cached block has a prefix"
        if isinstance(parent, Prefix):
            store.offer(parent)  # the prefix was requested again, so storing it is worthwhile
        # Most embeddings and all prompt log-probabilities need the outputs of every token, so all tokens are computed.
        if sequence.request.pooling is not None or sequence.is_scoring:
            return False
        names, token_ids = self._stored_after(parent, sequence, len(cached), store)
        compute_s = len(names) * self._pool.block_size / tokens_per_s if tokens_per_s else inf
        if not names or store.expected_s(len(names), sequence.request) >= compute_s:
            return False
        slot = None if self._pool.states is None else self._pool.states.reserve(cached[-1].prefix if cached else None)
        if self._pool.states is not None and slot is None:
            return False
        self._pool.share(cached)
        blocks = self._pool.allocate(len(names))
        fetch = Fetch(sequence.request, before=cached, blocks=blocks, names=names, token_ids=token_ids, slot=slot)
        patience_s = max(compute_s, MIN_PATIENCE_S) if tokens_per_s else FIRST_PATIENCE_S
        self._expected.append(_PendingFetch(sequence, sequence.arrival, parent, fetch, now, now + patience_s))
        sequence.status = SequenceStatus.FETCHING
        self._begun.append((sequence.arrival, len(blocks)))
        store.begin(fetch)
        return True

    def _stored_after(
        self, parent: Prefix | str, sequence: EngineSequence, num_cached: int, store: BlockStore
    ) -> tuple[list[bytes], list[tuple[int, ...]]]:
        """Return the names and tokens of the stored blocks after the cached ones. Excludes the last token's block."""
        size = self._pool.block_size
        names: list[bytes] = []
        token_ids: list[tuple[int, ...]] = []

        def names_in_turn() -> Iterator[bytes]:
            name = root_name(store.namespace, parent) if isinstance(parent, str) else name_of(parent, store.namespace)
            for end in range((1 + num_cached) * size, sequence.num_tokens, size):
                token_ids.append(sequence.token_ids(end - size, end))
                name = name_after(name, token_ids[-1])
                names.append(name)
                yield name

        number = store.lookup(names_in_turn(), sequence.request, num_before=num_cached)
        return names[:number], token_ids[:number]

    def collect(self, now: float) -> list[EngineSequence]:
        """Return the sequences whose fetch is done or has taken too long. The caller must queue them again."""
        back: list[EngineSequence] = []
        still: list[_PendingFetch] = []
        for each in self._expected:
            is_done = each.fetch.is_done  # read only once, because the store's thread sets it
            if each.sequence is not None and (is_done or now >= each.abandon_at):
                self.num_given_up += not is_done
                each.sequence.fetch_s += now - each.began_at
                each.sequence.num_fetched_tokens += is_done * each.fetch.num_usable * self._pool.block_size
                back.append(self._leave(each))
            if is_done:
                self._publish(each)
            else:
                still.append(each)
        self._expected = still
        return back

    def take_notes(self) -> tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]:
        """Return the fetches that began since the last call, and those that finished.

        Each is (arrival number, blocks): the requested blocks if it began, the usable blocks if it finished.
        """
        notes = tuple(self._begun), tuple(self._done)
        self._begun.clear()
        self._done.clear()
        return notes

    def drop(self, sequence: EngineSequence) -> None:
        """Abandon the fetch of a sequence that has ended. Its blocks are freed when the fetch is done."""
        for each in self._expected:
            if each.sequence is sequence:
                self._leave(each)

    def give_up(self) -> list[EngineSequence]:
        """Abandon all fetches before the memory is released. Returns the waiting sequences, which may fetch again.

        Waits up to a few seconds for the store to write the offered blocks.
        """
        back = [self._leave(each) for each in self._expected if each.sequence is not None]
        for sequence in back:
            sequence.fetch_epoch = -1
        for each in self._expected:
            each.is_void = True
        if self.store is not None:
            settling_s = 5.0  # writing 256 MiB to a local folder takes half a second
            self.store.settle(settling_s)
        return back

    def _leave(self, expected: _PendingFetch) -> EngineSequence:
        sequence, expected.sequence = expected.sequence, None
        assert sequence is not None, "a sequence waits for this fetch"
        expected.fetch.is_wanted = False
        if sequence.status is SequenceStatus.FETCHING:
            sequence.status = SequenceStatus.WAITING
        return sequence

    def _publish(self, expected: _PendingFetch) -> None:
        """Cache the filled blocks in the pool, and free all of the fetch's blocks."""
        fetch, parent = expected.fetch, expected.parent
        num_usable = 0 if expected.is_void else fetch.num_usable
        for block, token_ids in zip(fetch.blocks[:num_usable], fetch.token_ids, strict=False):
            parent = self._pool.cache_full_block(block, token_ids, parent=parent, tenant=fetch.request.tenant)
        self.num_tokens += num_usable * self._pool.block_size
        if self._pool.states is not None and fetch.slot is not None:
            num_tokens = (len(fetch.before) + num_usable) * self._pool.block_size
            prefix = parent if num_usable and isinstance(parent, Prefix) else None
            self._pool.states.take_back(fetch.slot, prefix, num_tokens)
        self._pool.free([*fetch.before, *fetch.blocks])
        self._done.append((expected.arrival, fetch.num_usable))
