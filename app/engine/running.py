"""The running sequences in rank order, and the blocks that they own."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from app.engine.block_pool import BlockPool
from app.engine.policies import OrderKey
from app.engine.prefix import Block, Prefix
from app.engine.request import Pooling
from app.engine.sequence import EngineSequence, SequenceStatus, Windows
from app.engine.state_pool import SLOTS_OF_SEQUENCE, StatePath

_order_key = attrgetter("order_key")


class _Match(NamedTuple):
    """The cached blocks of a sequence's prefix. Valid while each block still stores the prefix recorded here."""

    sequence: EngineSequence
    blocks: list[Block]
    prefixes: list[Prefix | None]


def _have_prefixes(blocks: Sequence[Block], prefixes: Sequence[Prefix | None]) -> bool:
    return all(block.prefix is prefix for block, prefix in zip(blocks, prefixes, strict=True))


class RunningSequences:
    """Allocates the blocks of running sequences and frees them. The last sequence in order is preempted first."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.in_order: list[EngineSequence] = []  # read-only for callers
        self.epoch = 0  # how many times a sequence's blocks were freed
        self.num_background = 0  # running sequences of background requests
        self.num_predicted = 0  # running sequences whose request includes a prediction of the output
        self._match: _Match | None = None  # the last prefix lookup

    def __len__(self) -> int:
        return len(self.in_order)

    def __iter__(self) -> Iterator[EngineSequence]:
        return iter(self.in_order)

    @property
    def last(self) -> EngineSequence:
        """The sequence that is preempted first. At least one sequence must be running."""
        return self.in_order[-1]

    # ------------------------------------------------------------------ joining and leaving

    def blocks_to_join(self, sequence: EngineSequence) -> tuple[list[Block], int]:
        """Return a sequence's cached prefix blocks, and how many free blocks it needs to hold its known tokens."""
        cached = self._cached_prefix(sequence)
        if sequence.request.pooling == Pooling.MEAN:  # the mean needs the hidden states of every token
            cached = []
        if sequence.is_scoring:  # cached blocks yield no log-probabilities, so reuse only the blocks already scored
            cached = cached[: sequence.num_scored_tokens // self._pool.block_size]
        cached = self._pool.with_states(self._pool.with_windows(cached))
        num_blocks = self._pool.num_blocks_after(cached, sequence.num_tokens)
        in_windows = chain.from_iterable(self._pool.found_in_windows(cached))
        return cached, num_blocks + self._pool.num_free_among(cached) + self._pool.num_free_among(in_windows)

    def _cached_prefix(self, sequence: EngineSequence) -> list[Block]:
        # The first waiting sequence is looked up at every step until it joins. Reusing the last match avoids rehashing.
        known: Sequence[Block] = ()
        last = self._match
        if last is not None and last.sequence is sequence and _have_prefixes(last.blocks, last.prefixes):
            known = last.blocks
        token_ids = sequence.token_ids(0, sequence.num_tokens)
        cached = self._pool.match(token_ids, salt=sequence.request.prefix_salt, known=known)
        self._match = _Match(sequence, cached, [block.prefix for block in cached])
        return cached

    def share(self, sequence: EngineSequence, cached: list[Block]) -> None:
        """Start a sequence after the cached blocks of its prefix, and make the sequence an owner of these blocks."""
        num_matched = 0 if self._match is None else len(self._match.blocks)
        self._match = None  # it refers to the sequence
        sequence.status = SequenceStatus.RUNNING
        in_windows = self._pool.found_in_windows(cached)
        self._pool.share(chain(cached, *in_windows))
        sequence.extend_blocks(cached)
        if in_windows:
            sequence.windows = Windows(len(cached) - len(in_windows[0]), in_windows)
        sequence.prefixes = [block.prefix for block in cached if block.prefix is not None]
        sequence.num_computed_tokens = len(cached) * self._pool.block_size
        if self._pool.states is not None:
            prefix = sequence.prefixes[-1] if cached else None
            assert prefix is None or prefix.num_tokens == sequence.num_computed_tokens, "the prefix fills its blocks"
            sequence.states = self._pool.states.begin(prefix)
            sequence.states.num_matched_tokens = num_matched * self._pool.block_size

    def add(self, sequence: EngineSequence) -> None:
        insort(self.in_order, sequence, key=_order_key)
        self.num_background += sequence.request.is_background
        self.num_predicted += bool(sequence.request.prediction_token_ids)

    def remove(self, sequence: EngineSequence) -> None:
        """Remove a sequence and free its blocks. All of its tokens then count as uncomputed."""
        # Bisection uses the order of the list; list.remove would compare half of the list on average.
        index = bisect_left(self.in_order, sequence.order_key, key=_order_key)
        while self.in_order[index] is not sequence:  # several sequences may have the same rank
            index += 1
        del self.in_order[index]
        self.num_background -= sequence.request.is_background
        self.num_predicted -= bool(sequence.request.prediction_token_ids)
        sequence.epoch = self.epoch = self.epoch + 1
        self._pool.free(sequence.take_blocks())
        if self._pool.states is not None and sequence.states is not None:
            self._pool.states.end(sequence.states)
            sequence.states = None

    def reorder(self, order_key: Callable[[EngineSequence], OrderKey]) -> None:
        """Give every running sequence a new rank and sort by it."""
        for sequence in self.in_order:
            sequence.order_key = order_key(sequence)
        self.in_order.sort(key=_order_key)

    # ------------------------------------------------------------------ growing

    def has_room_for(self, sequence: EngineSequence, num_tokens: int) -> bool:
        """Whether the free blocks suffice for `num_tokens` more tokens of the sequence."""
        return self._pool.can_allocate(self.num_missing_blocks(sequence, num_tokens))

    def extend(self, sequence: EngineSequence, num_tokens: int) -> None:
        """Allocate a sequence's blocks for `num_tokens` more tokens. `has_room_for` must be true."""
        blocks, num_groups = self._pool.allocate(self.num_missing_blocks(sequence, num_tokens)), self._pool.num_groups
        sequence.extend_blocks(blocks[::num_groups])
        if sequence.windows is not None:
            sequence.windows.extend(blocks[group::num_groups] for group in range(1, num_groups))

    def num_draftable(self, sequence: EngineSequence, *, is_short: bool) -> int:
        """Return how many drafts a sequence has room for. The last token before `max_tokens` is never a draft.

        is_short: whether blocks are scarce, so that drafts must fit into the blocks that the sequence already owns.
        """
        num_free = 0 if is_short else self._pool.num_free // self._pool.num_groups
        num_slots = (len(sequence.blocks) + num_free) * self._pool.block_size
        num_left = sequence.request.sampling.max_tokens - sequence.num_generated_tokens
        number = min(num_slots - sequence.num_computed_tokens, num_left) - 1
        if self._pool.states is None:
            return number
        return min(number, self._pool.states.num_free // len(self.in_order) - 1)  # every draft needs a state slot

    def num_missing_blocks(self, sequence: EngineSequence, num_tokens: int) -> int:
        """Return how many more blocks, over all groups, the sequence needs for `num_tokens` more tokens."""
        num_blocks = self._pool.num_blocks_for(sequence.num_computed_tokens + num_tokens)
        return (num_blocks - len(sequence.blocks)) * self._pool.num_groups

    # ------------------------------------------------------------------ states

    def can_begin(self, cached: Sequence[Block], *, num_ended: int = 0) -> bool:
        """Whether enough state slots are free for a sequence that starts after these cached blocks.

        num_ended: number of running sequences that will be preempted before the sequence starts.
        """
        states = self._pool.states
        prefix = cached[-1].prefix if cached else None
        return states is None or states.has_room(prefix, num_freed=SLOTS_OF_SEQUENCE * num_ended)

    def state_path(self, sequence: EngineSequence, num_tokens: int) -> StatePath:
        """Return the state slots for a step that computes `num_tokens` of a sequence's tokens."""
        pool, states, start = self._pool.states, sequence.states, sequence.num_computed_tokens
        assert pool is not None, "the model has recurrent layers"
        assert states is not None, "the sequence runs"
        marks = self._snapshot_marks(sequence, start, start + num_tokens)
        has_drafts = num_tokens > 1 and sequence.is_decoding
        return pool.path(states, start, start + num_tokens, marks, has_drafts=has_drafts)

    def _snapshot_marks(self, sequence: EngineSequence, start: int, end: int) -> list[int]:
        """Return the lengths in (start, end] whose state is worth a snapshot. They are multiples of the block size."""
        size = self._pool.block_size
        if sequence.is_decoding:
            return list(range(size * (start // size + 1), end + 1, size))
        assert self._pool.states is not None, "the model has recurrent layers"
        assert sequence.states is not None, "the sequence runs"
        # Where this prompt branches off a cached one, and where an equal or a longer prompt would resume.
        wanted = {
            sequence.states.num_matched_tokens,
            *(size * (number // size) for number in (sequence.num_tokens - 1, sequence.num_tokens)),
        }
        interval = self._pool.states.interval_tokens
        wanted.update(range(interval * (start // interval + 1), end + 1, interval))
        return sorted(mark for mark in wanted if start < mark <= end)

    # ------------------------------------------------------------------ preemption

    def to_preempt_for(
        self,
        waiting: EngineSequence,
        *,
        may_preempt: Callable[[EngineSequence, EngineSequence], bool],
        max_running: int,
    ) -> list[EngineSequence]:
        """Return the sequences to preempt so that `waiting` can run, or none if preemption cannot make enough room."""
        if not self.in_order or self.last.order_key <= waiting.order_key:
            return []
        cached, num_blocks = self.blocks_to_join(waiting)
        num_slots = max_running - len(self.in_order)
        num_free = self._pool.num_free
        victims: list[EngineSequence] = []
        for running in reversed(self.in_order):
            is_enough = num_slots > 0 and num_free >= num_blocks and self.can_begin(cached, num_ended=len(victims))
            if is_enough or running.order_key <= waiting.order_key:
                break
            if may_preempt(waiting, running):
                victims.append(running)
                num_slots += 1
                num_free += sum(block.num_owners == 1 for block in running.all_blocks())
        is_enough = num_slots > 0 and num_free >= num_blocks and self.can_begin(cached, num_ended=len(victims))
        return victims if is_enough else []
