"""The slots for the states of recurrent layers, and the snapshots from which a cached prefix can be resumed.

A recurrent layer has one state for a whole sequence, instead of keys and values for each token. A state cannot be
rewound, so a cached prefix is only useful if the state after it was stored: a snapshot. As in SGLang's hybrid radix
cache and vLLM's Mamba prefix caching, snapshots are taken at selected lengths. A step reads one slot and writes another
one, so a snapshot requires no copy and a failed step can be retried. Contains no tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from app.engine.prefix import Prefix, Snapshot

NO_STATE = -1  # the zero state before the first token
SLOTS_OF_SEQUENCE = 2


@dataclass(frozen=True, slots=True)
class StatePath:
    """The slots that a step uses for one sequence's tokens.

    The state after the first `writes[i][0]` tokens is written to slot `writes[i][1]`. The last entry in `writes` is for
    the state after all tokens.
    """

    read: int  # slot of the state before the first token, or NO_STATE
    writes: tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class SequenceStates:
    """The slots of a running sequence."""

    own: tuple[int, int]  # two slots that no other sequence reads
    current: int = NO_STATE  # slot of the state after all computed tokens: one of `own`, or a snapshot's slot
    num_matched_tokens: int = 0  # length of the prefix with cached keys and values, which may exceed its last snapshot
    new: list[tuple[int, int]] = field(default_factory=list)  # the current step's snapshots: (length in tokens, slot)
    # The other slots that the current step writes, by the sequence's length in tokens. With drafts, each length has its
    # own slot, because the number of accepted drafts is not known until the step has finished.
    behind: dict[int, int] = field(default_factory=dict)
    latest: Prefix | None = None  # prefix of the newest snapshot, except the one at `num_matched_tokens`
    has_generated: bool = False  # whether `latest` was taken while the sequence was decoding

    @property
    def next(self) -> int:
        """The slot in `own` that the next step writes."""
        first, second = self.own
        return second if self.current == first else first


class StatePool:
    """Owns all slots. A slot is free, belongs to a sequence, holds a snapshot, or is reserved for a store to fill.

    When slots are needed, snapshots that no sequence reads are evicted, the least recently used first.
    """

    def __init__(self, num_slots: int, *, interval_tokens: int) -> None:
        """interval_tokens: number of tokens between two snapshots of a long prompt."""
        assert num_slots >= SLOTS_OF_SEQUENCE, "a sequence needs two slots"
        self.num_slots = num_slots
        self.interval_tokens = interval_tokens
        self._blank = list(reversed(range(num_slots)))
        self._snapshots: OrderedDict[int, Snapshot] = OrderedDict()  # by slot, the least recently used first
        self._num_readers: dict[int, int] = {}  # by slot of a snapshot, even a removed one: sequences that read it
        self.note_resumable: Callable[[Prefix, bool], None] | None = None  # called when a snapshot is added or removed
        # Called with a prefix whose snapshot is worth storing elsewhere, because it will not be superseded soon.
        self.on_durable_snapshot: Callable[[Prefix], None] | None = None

    @property
    def num_free(self) -> int:
        """Number of slots available to new sequences, including those of snapshots that no sequence reads."""
        num_read = sum([slot in self._snapshots for slot in self._num_readers])
        return len(self._blank) + len(self._snapshots) - num_read

    def has_room(self, prefix: Prefix | None, *, num_freed: int = 0) -> bool:
        """Whether a sequence may start after a prefix. num_freed: number of slots that will be freed before that."""
        needed = SLOTS_OF_SEQUENCE - num_freed
        if len(self._blank) >= needed:
            return True
        used = None if prefix is None else prefix.snapshot
        return self.num_free - (used is not None and used.slot not in self._num_readers) >= needed

    def resumable(self) -> list[Prefix]:
        """Return all prefixes with a snapshot."""
        return [each.prefix for each in self._snapshots.values()]

    def begin(self, prefix: Prefix | None) -> SequenceStates:
        """Allocate slots for a sequence that starts after a prefix with a snapshot, or at its first token.

        `has_room` must be true.
        """
        current = NO_STATE
        if prefix is not None:
            assert prefix.snapshot is not None, "a sequence only resumes at a snapshot"
            current = prefix.snapshot.slot
            self._snapshots.move_to_end(current)
            self._read(current)
        first, second = self._take(), self._take()
        assert first is not None, "there was room"
        assert second is not None, "there was room"
        return SequenceStates((first, second), current)

    def path(
        self, states: SequenceStates, start: int, end: int, marks: list[int], *, has_drafts: bool = False
    ) -> StatePath:
        """Return the slots for a step that computes the tokens in [start, end).

        marks: the lengths in (start, end] at which to take a snapshot, ascending. If no slot is left, the remaining
        snapshots are skipped. has_drafts: whether all tokens but the first are drafts, so that the state after each
        token must be available until the step ends. A slot for each draft must be free.
        """
        assert not states.new, "the previous step has not ended"
        for mark in marks:
            slot = self._take()
            if slot is None:
                break
            states.new.append((mark, slot))
        written = dict(states.new)
        for number in range(start + 1 if has_drafts else end, end + 1):
            if number not in written:
                slot = self._take() if states.behind else states.next
                assert slot is not None, "too few slots for the drafts"
                states.behind[number] = written[number] = slot
        return StatePath(states.current, tuple((number - start, written[number]) for number in sorted(written)))

    def advance(self, states: SequenceStates, end: int, prefixes: Sequence[Prefix], *, generates: bool) -> None:
        """Account for a step that has succeeded. `end` is the sequence's new length, without rejected drafts.

        prefixes: the cached prefix of each snapshot up to `end` (see `SequenceStates.new`). generates: whether the
        sequence was decoding.
        """
        new = [each for each in states.new if each[0] <= end]
        spare = [slot for number, slot in states.new if number > end]
        if end in states.behind:
            last = states.behind[end]
            spare += self._adopt_slot(states, last)
        else:
            last = new[-1][1]
            self._read(last)
        spare += [slot for slot in states.behind.values() if slot not in states.own]
        self._leave(states)
        states.current = last
        for (num_tokens, slot), prefix in zip(new, prefixes, strict=True):
            if self._keep(prefix, slot, num_tokens):
                if num_tokens != states.num_matched_tokens:
                    self._supersede(states, prefix, generates=generates)
                if not generates:
                    self._note_lasting(prefix)
            elif slot != last:
                spare.append(slot)
        self._blank += spare
        states.new.clear()
        states.behind.clear()

    def end(self, states: SequenceStates) -> None:
        """Free all slots of a sequence. Its snapshots remain."""
        if states.has_generated and states.latest is not None:
            self._note_lasting(states.latest)
        self._blank.extend(slot for _, slot in states.new)
        self._blank.extend(slot for slot in states.behind.values() if slot not in states.own)
        states.new.clear()
        states.behind.clear()
        self._leave(states)
        self._blank.extend(states.own)

    def forget(self, prefix: Prefix) -> None:
        """Remove a prefix's snapshot, if any, because the prefix's block was evicted or the slot is needed."""
        snapshot = prefix.snapshot
        if snapshot is not None:
            prefix.snapshot = None
            del self._snapshots[snapshot.slot]
            self._note(prefix, False)
            if snapshot.slot not in self._num_readers:
                self._blank.append(snapshot.slot)

    # ------------------------------------------------------------------ snapshots from a store

    def reserve(self, before: Prefix | None = None) -> int | None:
        """Reserve a slot for a store to fill, or return None if too few slots would be left for a sequence to use it.

        before: the prefix after which the sequence starts if the fetch fails. Its snapshot is evicted last.
        """
        if before is not None and before.snapshot is not None:
            self._snapshots.move_to_end(before.snapshot.slot)
        return self._take() if self.num_free > SLOTS_OF_SEQUENCE else None

    def take_back(self, slot: int, prefix: Prefix | None, num_tokens: int) -> None:
        """End the reservation of a slot, to which the store no longer writes.

        prefix: the cached prefix of `num_tokens` tokens whose states are in the slot, or None if they are not usable.
        """
        if prefix is None or not self._keep(prefix, slot, num_tokens):
            self._blank.append(slot)

    # ------------------------------------------------------------------

    def _adopt_slot(self, states: SequenceStates, slot: int) -> list[int]:
        """Make a slot that the step has written one of the sequence's `own` slots. Returns the replaced slot."""
        if slot in states.own:
            return []
        first, second = states.own
        replaced = first if states.next == second else second
        states.own = (states.next, slot)
        return [replaced]

    def _keep(self, prefix: Prefix, slot: int, num_tokens: int) -> bool:
        """Make a slot a prefix's snapshot. Returns False if the prefix was evicted or already has a snapshot."""
        assert prefix.num_tokens == num_tokens, f"state after {num_tokens} tokens for a prefix of {prefix.num_tokens}"
        if not prefix.is_held or prefix.snapshot is not None:
            return False
        prefix.snapshot = self._snapshots[slot] = Snapshot(prefix, slot)
        self._note(prefix, True)
        return True

    def _supersede(self, states: SequenceStates, prefix: Prefix, *, generates: bool) -> None:
        """Mark the sequence's previous snapshot for eviction, because conversations resume from their end.

        If it was taken while the sequence was decoding, it is removed immediately. Otherwise, it will be evicted first.
        """
        before, had_generated = states.latest, states.has_generated
        states.latest, states.has_generated = prefix, generates
        if before is None or before.snapshot is None or before.snapshot.slot in self._num_readers:
            return
        if had_generated:
            self.forget(before)
        else:
            self._snapshots.move_to_end(before.snapshot.slot, last=False)

    def _take(self) -> int | None:
        """Return an empty slot, or None if every slot is in use. Evicts a snapshot if necessary."""
        if not self._blank:
            unread = (each.prefix for slot, each in self._snapshots.items() if slot not in self._num_readers)
            if (prefix := next(unread, None)) is None:
                return None
            self.forget(prefix)
        return self._blank.pop()

    def _read(self, slot: int) -> None:
        self._num_readers[slot] = self._num_readers.get(slot, 0) + 1

    def _leave(self, states: SequenceStates) -> None:
        """Stop counting the sequence as a reader of its current slot."""
        slot, states.current = states.current, NO_STATE
        if slot not in self._num_readers:
            return
        self._num_readers[slot] -= 1
        if not self._num_readers[slot]:
            del self._num_readers[slot]
            if slot not in self._snapshots:
                self._blank.append(slot)

    def _note(self, prefix: Prefix, is_resumable: bool) -> None:
        if self.note_resumable is not None:
            self.note_resumable(prefix, is_resumable)

    def _note_lasting(self, prefix: Prefix) -> None:
        if self.on_durable_snapshot is not None and prefix.snapshot is not None:
            self.on_durable_snapshot(prefix)
