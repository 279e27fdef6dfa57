"""The slots for the states of recurrent layers, and the snapshots that let a cached prefix be resumed.

A recurrent layer keeps one state for a whole sequence in place of keys and values for each token. The state cannot go
back, so a cached prefix is of use only where the state behind the prefix was kept: a snapshot. Snapshots at chosen
lengths follow SGLang's hybrid radix cache and vLLM's Mamba prefix caching; a step reads one slot and writes another, so
a snapshot copies nothing and a failed step can be computed again.

No tensors here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from app.engine.block_pool import Prefix

NO_STATE = -1  # the state before the first token, which is zero
SLOTS_OF_SEQUENCE = 2


@dataclass(frozen=True, slots=True)
class StatePath:
    """The slots that a step uses for the tokens of one sequence.

    The states behind the first `writes[0][0]` of the tokens go to the slot `writes[0][1]`, and so on; the last of these
    is the state behind all tokens.
    """

    read: int  # the state before the first token, or NO_STATE
    writes: tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class SequenceStates:
    """The slots that belong to one running sequence."""

    own: tuple[int, int]  # no other sequence reads these two
    current: int = NO_STATE  # the state behind all computed tokens, in an own slot or in a snapshot
    branch_tokens: int = 0  # cached keys and values reach so far, and no snapshot does
    new: list[tuple[int, int]] = field(default_factory=list)  # of the step under way: tokens of the sequence, and slot
    latest: Prefix | None = None  # the snapshot that was made last, at no branch
    has_generated: bool = False  # whether `latest` was made while the sequence generated

    @property
    def next(self) -> int:
        """The own slot that the next step writes."""
        first, second = self.own
        return second if self.current == first else first


class StatePool:
    """Owns all slots. A slot is free, or belongs to a sequence, or has a snapshot.

    A snapshot that no sequence reads makes room for others, the longest unused first.
    """

    def __init__(self, num_slots: int, *, interval_tokens: int) -> None:
        """interval_tokens: the distance of the snapshots of a long prompt."""
        assert num_slots >= SLOTS_OF_SEQUENCE, "a sequence needs two slots"
        self.num_slots = num_slots
        self.interval_tokens = interval_tokens
        self._blank = list(reversed(range(num_slots)))
        self._snapshots: OrderedDict[Prefix, int] = OrderedDict()  # the longest unused first
        self._num_readers: dict[int, int] = {}  # of slots with a snapshot, or with one that was forgotten
        self.note_resumable: Callable[[Prefix, bool], None] | None = None  # called when a snapshot comes or goes

    @property
    def num_free(self) -> int:
        """Slots that a new sequence may have."""
        return len(self._blank) + sum(slot not in self._num_readers for slot in self._snapshots.values())

    def has_room(self, prefix: Prefix | None, *, num_freed: int = 0) -> bool:
        """Whether a sequence may begin behind a prefix. num_freed: slots that come free before it begins."""
        needed = SLOTS_OF_SEQUENCE - num_freed
        if len(self._blank) >= needed:
            return True
        used = self._snapshots.get(prefix) if prefix is not None else None
        return self.num_free - (used is not None and used not in self._num_readers) >= needed

    def resumable(self) -> list[Prefix]:
        """All prefixes with a snapshot."""
        return list(self._snapshots)

    def has_snapshot(self, prefix: Prefix | None) -> bool:
        return prefix in self._snapshots

    def begin(self, prefix: Prefix | None) -> SequenceStates:
        """Give slots to a sequence that begins behind a prefix with a snapshot, or at its first token.

        `has_room` must hold.
        """
        current = NO_STATE
        if prefix is not None:
            current = self._snapshots[prefix]
            self._snapshots.move_to_end(prefix)
            self._read(current)
        first, second = self._take(), self._take()
        assert first is not None, "there was room"
        assert second is not None, "there was room"
        return SequenceStates((first, second), current)

    def path(self, states: SequenceStates, start: int, end: int, marks: list[int]) -> StatePath:
        """The slots for a step that computes the tokens from `start` to `end`.

        marks: the lengths, ascending, behind which a snapshot is wanted, within these tokens. A snapshot for which
        there is no slot is left out.
        """
        assert not states.new, "the step before has ended"
        writes: list[tuple[int, int]] = []
        for mark in marks:
            slot = self._take()
            if slot is None:
                break
            states.new.append((mark, slot))
            writes.append((mark - start, slot))
        if not writes or writes[-1][0] < end - start:
            writes.append((end - start, states.next))
        return StatePath(states.current, tuple(writes))

    def advance(self, states: SequenceStates, end: int, find: Callable[[int], Prefix], *, generates: bool) -> None:
        """A step has succeeded: it has computed all tokens up to `end`.

        find: the prefix of so many tokens. Its block is cached.
        generates: whether the step computed a token that the sequence has generated.
        """
        last = states.next
        if states.new and states.new[-1][0] == end:
            last = states.new[-1][1]
            self._read(last)
        self._leave(states)
        states.current = last
        for num_tokens, slot in states.new:
            prefix = find(num_tokens)
            if prefix.is_held and prefix not in self._snapshots:
                self._snapshots[prefix] = slot
                self._note(prefix, True)
                if num_tokens != states.branch_tokens:
                    self._supersede(states, prefix, generates=generates)
            elif slot != last:
                self._blank.append(slot)
        states.new.clear()

    def end(self, states: SequenceStates) -> None:
        """Take all slots back from a sequence. Its snapshots stay."""
        self._blank.extend(slot for _, slot in states.new)
        states.new.clear()
        self._leave(states)
        self._blank.extend(states.own)

    def forget(self, prefix: Prefix) -> None:
        """The block of a prefix has other content now, so no sequence can begin behind it."""
        slot = self._snapshots.pop(prefix, None)
        if slot is not None:
            self._note(prefix, False)
            if slot not in self._num_readers:
                self._blank.append(slot)

    def _supersede(self, states: SequenceStates, prefix: Prefix, *, generates: bool) -> None:
        """A conversation goes on from its end, so the snapshot that the sequence has made before makes room first.

        Of an answer only the last snapshot stays.
        """
        before, had_generated = states.latest, states.has_generated
        states.latest, states.has_generated = prefix, generates
        if before is None or before not in self._snapshots or self._snapshots[before] in self._num_readers:
            return
        if had_generated:
            self.forget(before)
        else:
            self._snapshots.move_to_end(before, last=False)

    def _take(self) -> int | None:
        """A slot with nothing in it; None: sequences have them all."""
        if not self._blank:
            unread = (prefix for prefix, slot in self._snapshots.items() if slot not in self._num_readers)
            if (prefix := next(unread, None)) is None:
                return None
            self.forget(prefix)
        return self._blank.pop()

    def _read(self, slot: int) -> None:
        self._num_readers[slot] = self._num_readers.get(slot, 0) + 1

    def _leave(self, states: SequenceStates) -> None:
        """The sequence reads its current state no longer."""
        slot, states.current = states.current, NO_STATE
        if slot not in self._num_readers:
            return
        self._num_readers[slot] -= 1
        if not self._num_readers[slot]:
            del self._num_readers[slot]
            if slot not in self._snapshots.values():
                self._blank.append(slot)

    def _note(self, prefix: Prefix, is_resumable: bool) -> None:
        if self.note_resumable is not None:
            self.note_resumable(prefix, is_resumable)
