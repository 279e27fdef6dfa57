"""The sequences whose prefixes are on their way from a store, and the blocks and slots that these will fill."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Several
from dataclasses import dataclass
from math import inf

from app.engine.block_pool import Block, BlockPool, Prefix
from app.engine.block_store import BlockStore, Fetch, name_after, name_of, root_name
from app.engine.request import Address
from app.engine.sequence import Sequence, SequenceStatus
from app.engine.stats import StoreStats

# While nothing else is due, the engine looks so often whether a prefix has come; and whether blocks have come back for
# which no sequence waits any more.
LOOK_AGAIN_S, LOOK_LATER_S = 0.001, 0.1
# A fetch may take as long as computing would. Where that is less, or not known yet, it may take so long.
MIN_PATIENCE_S, FIRST_PATIENCE_S = 0.05, 1.0


@dataclass(slots=True, eq=False)
class _Expected:
    """A fetch under way. `sequence` waits for it; None: it has ended, or computes instead."""

    sequence: Sequence | None
    arrival: int  # the sequence's
    parent: Prefix | str  # of its first block
    fetch: Fetch  # the blocks before its own are owned meanwhile, too
    began_at: float
    gives_up_at: float
    is_void: bool = False  # the memory that it fills is given up


class PrefixFetches:
    """Has a store fill blocks for the first waiting sequence where that is quicker than computing.

    Filled blocks are free and findable like all cached ones: the sequence goes back to the queue, and finds them there.
    Without a store nothing is ever fetched.
    """

    def __init__(self, pool: BlockPool, store: BlockStore | None) -> None:
        self._pool = pool
        self.store = store
        self._expected: list[_Expected] = []
        self._begun: list[tuple[int, int]] = []  # since `take_notes`: arrival, number of blocks
        self._done: list[tuple[int, int]] = []
        self.num_tokens = 0  # that were fetched, since the start
        self.num_given_up = 0  # fetches that took too long, since the start
        if store is not None and pool.states is not None:
            pool.states.note_lasting = self._offer_long
        elif store is not None:
            pool.note_findable = self._offer_long

    def _offer_long(self, prefix: Prefix) -> None:
        """Offer a prefix that has come once. Most short ones never come again, and are soon computed if they do."""
        assert self.store is not None
        if prefix.num_blocks * self._pool.block_size >= self.store.min_tokens:
            self.store.offer(prefix)

    def serve(self, host: str) -> Address | None:
        """See `BlockStore.serve`. Any thread may call."""
        return None if self.store is None else self.store.serve(host, self._pool.find)

    def stats(self) -> StoreStats | None:
        """None without a store. Any thread may call."""
        if self.store is None:
            return None
        return self.store.stats()._replace(num_fetched_tokens=self.num_tokens, num_given_up=self.num_given_up)

    def __len__(self) -> int:
        """Sequences that wait for a fetch."""
        return sum([each.sequence is not None for each in self._expected])

    def due_at(self, now: float) -> float | None:
        """When to look whether a fetch is done; None: none is under way."""
        if not self._expected:
            return None
        if any(each.fetch.is_done for each in self._expected):
            return now
        return now + (LOOK_AGAIN_S if len(self) else LOOK_LATER_S)

    def begin(self, sequence: Sequence, cached: list[Block], *, now: float, tokens_per_s: float) -> bool:
        """Fetch what follows the cached blocks of its prefix, and return whether the sequence is to wait for it.

        cached: the blocks that it would share if it joined now. tokens_per_s: of computing; 0 while not known. The pool
        has free blocks for all of its tokens.
        """
        store = self.store
        if store is None or sequence.has_fetched:
            return False
        sequence.has_fetched = True  # once: what is evicted before it joins is computed
        parent = sequence.request.prefix_salt if not cached else cached[-1].prefix
        assert parent is not None, "a cached block has a prefix"
        if isinstance(parent, Prefix):
            store.offer(parent)  # it has come again
        # Where every token's hidden state or probability is wanted, all are computed.
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
        self._expected.append(_Expected(sequence, sequence.arrival, parent, fetch, now, now + patience_s))
        sequence.status = SequenceStatus.FETCHING
        self._begun.append((sequence.arrival, len(blocks)))
        store.begin(fetch)
        return True

    def _stored_after(
        self, parent: Prefix | str, sequence: Sequence, num_cached: int, store: BlockStore
    ) -> tuple[list[bytes], list[tuple[int, ...]]]:
        """The names and tokens of the blocks after the cached ones that the store has, without the last token's."""
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

    def collect(self, now: float) -> list[Sequence]:
        """The sequences whose fetch is done or takes too long: they go back to the queue."""
        back: list[Sequence] = []
        still: list[_Expected] = []
        for each in self._expected:
            is_done = each.fetch.is_done  # read once: the store's thread sets it
            if each.sequence is not None and (is_done or now >= each.gives_up_at):
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

    def take_notes(self) -> tuple[Several[tuple[int, int]], Several[tuple[int, int]]]:
        """The fetches that began and those that are done since the last call: the sequence's arrival and the number of
        blocks, of those done the filled ones."""
        notes = tuple(self._begun), tuple(self._done)
        self._begun.clear()
        self._done.clear()
        return notes

    def drop(self, sequence: Sequence) -> None:
        """The sequence has ended. Its blocks are free when the store does not fill them any more."""
        for each in self._expected:
            if each.sequence is sequence:
                self._leave(each)

    def give_up(self) -> list[Sequence]:
        """The sequences that wait: they begin anew, as the memory that was to be filled is given up.

        What is offered is kept before, if that does not take long.
        """
        back = [self._leave(each) for each in self._expected if each.sequence is not None]
        for sequence in back:
            sequence.has_fetched = False
        for each in self._expected:
            each.is_void = True
        if self.store is not None:
            settling_s = 5.0  # a local folder takes half a second for 256 MiB
            self.store.settle(settling_s)
        return back

    def _leave(self, expected: _Expected) -> Sequence:
        sequence, expected.sequence = expected.sequence, None
        assert sequence is not None, "it waits"
        expected.fetch.is_wanted = False
        if sequence.status is SequenceStatus.FETCHING:
            sequence.status = SequenceStatus.WAITING
        return sequence

    def _publish(self, expected: _Expected) -> None:
        """Let all find what was filled, and free the blocks."""
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
