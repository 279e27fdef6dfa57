"""The slots for the states of recurrent layers, and the snapshots that let a cached prefix be resumed.

A recurrent layer keeps one state for a whole sequence in place of keys and values for each token. The state cannot go
back, so a cached prefix is of use only where the state behind the prefix was kept: a snapshot. Snapshots at chosen
lengths follow SGLang's hybrid radix cache and vLLM's Mamba prefix caching; a step reads one slot and writes another, so
a snapshot copies nothing and a failed step can be computed again.

No tensors here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
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
class Snapshot:
    """The states of all recurrent layers behind a prefix, in a slot that nothing writes.

    Each snapshot is a new object, also where an equal one was in the same slot before: while a prefix has the same
    snapshot, its slot was not written.
    """

    prefix: Prefix
    slot: int

    @property
    def is_held(self) -> bool:
        """Whether its slot still has it. Any thread may ask."""
        return self.prefix.snapshot is self

    @property
    def label(self) -> tuple[int, ...]:
        """See `label_of_snapshot`."""
        return label_of_snapshot(self.prefix.num_tokens, self.prefix.token_ids)


def label_of_snapshot(num_tokens: int, last_block: Sequence[int]) -> tuple[int, ...]:
    """The numbers that stand before a snapshot outside the slots: the number of tokens, then those of the last block.

    A state itself does not show behind how many tokens it is, so the label is compared whenever a snapshot is read.
    """
    return num_tokens, *last_block


@dataclass(slots=True, eq=False)
class SequenceStates:
    """The slots that belong to one running sequence."""

    own: tuple[int, int]  # no other sequence reads these two
    current: int = NO_STATE  # the state behind all computed tokens, in an own slot or in a snapshot
    branch_tokens: int = 0  # cached keys and values reach so far, and no snapshot does
    new: list[tuple[int, int]] = field(default_factory=list)  # of the step under way: tokens of the sequence, and slot
    # Of a step under way with drafts, the slots of the states behind its tokens that get no snapshot, by the number of
    # the sequence's tokens: the draft that is the last to be kept is known at the end of the step.
    behind: dict[int, int] = field(default_factory=dict)
    latest: Prefix | None = None  # the snapshot that was made last, at no branch
    has_generated: bool = False  # whether `latest` was made while the sequence generated

    @property
    def next(self) -> int:
        """The own slot that the next step writes."""
        first, second = self.own
        return second if self.current == first else first


class StatePool:
    """Owns all slots. A slot is free, or belongs to a sequence, or has a snapshot, or gets one from a store.

    A snapshot that no sequence reads makes room for others, the longest unused first.
    """

    def __init__(self, num_slots: int, *, interval_tokens: int) -> None:
        """interval_tokens: the distance of the snapshots of a long prompt."""
        assert num_slots >= SLOTS_OF_SEQUENCE, "a sequence needs two slots"
        self.num_slots = num_slots
        self.interval_tokens = interval_tokens
        self._blank = list(reversed(range(num_slots)))
        self._snapshots: OrderedDict[int, Snapshot] = OrderedDict()  # by slot, the longest unused first
        self._num_readers: dict[int, int] = {}  # of slots with a snapshot, or with one that was forgotten
        self.note_resumable: Callable[[Prefix, bool], None] | None = None  # called when a snapshot comes or goes
        # Called with a prefix whose snapshot is worth keeping elsewhere: no later one of its sequence replaces it soon.
        self.note_lasting: Callable[[Prefix], None] | None = None

    @property
    def num_free(self) -> int:
        """Slots that a new sequence may have."""
        num_read = sum([slot in self._snapshots for slot in self._num_readers])
        return len(self._blank) + len(self._snapshots) - num_read

    def has_room(self, prefix: Prefix | None, *, num_freed: int = 0) -> bool:
        """Whether a sequence may begin behind a prefix. num_freed: slots that come free before it begins."""
        needed = SLOTS_OF_SEQUENCE - num_freed
        if len(self._blank) >= needed:
            return True
        used = None if prefix is None else prefix.snapshot
        return self.num_free - (used is not None and used.slot not in self._num_readers) >= needed

    def resumable(self) -> list[Prefix]:
        """All prefixes with a snapshot."""
        return [each.prefix for each in self._snapshots.values()]

    def begin(self, prefix: Prefix | None) -> SequenceStates:
        """Give slots to a sequence that begins behind a prefix with a snapshot, or at its first token.

        `has_room` must hold.
        """
        current = NO_STATE
        if prefix is not None:
            assert prefix.snapshot is not None, "only behind a snapshot a sequence begins"
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
        """The slots for a step that computes the tokens from `start` to `end`.

        marks: the lengths, ascending, behind which a snapshot is wanted, within these tokens. A snapshot for which
        there is no slot is left out.
        has_drafts: all tokens but the first are drafts, so the state behind each of them is kept until the step ends.
        A slot for each must be free.
        """
        assert not states.new, "the step before has ended"
        for mark in marks:
            slot = self._take()
            if slot is None:
                break
            states.new.append((mark, slot))
        written = dict(states.new)
        for number in range(start + 1 if has_drafts else end, end + 1):
            if number not in written:
                slot = self._take() if states.behind else states.next
                assert slot is not None, "there are as many drafts as slots"
                states.behind[number] = written[number] = slot
        return StatePath(states.current, tuple((number - start, written[number]) for number in sorted(written)))

    def advance(self, states: SequenceStates, end: int, prefixes: Sequence[Prefix], *, generates: bool) -> None:
        """A step has succeeded. The sequence keeps the tokens up to `end`; the drafts behind `end` are wrong.

        prefixes: one for each snapshot of the step up to `end`, see `SequenceStates.new`. The prefixes are cached.
        generates: whether the step computed a token that the sequence has generated.
        """
        new = [each for each in states.new if each[0] <= end]
        spare = [slot for number, slot in states.new if number > end]
        if end in states.behind:
            last = states.behind[end]
            spare += self._own_from_now_on(states, last)
        else:
            last = new[-1][1]
            self._read(last)
        spare += [slot for slot in states.behind.values() if slot not in states.own]
        self._leave(states)
        states.current = last
        for (num_tokens, slot), prefix in zip(new, prefixes, strict=True):
            if self._keep(prefix, slot, num_tokens):
                if num_tokens != states.branch_tokens:
                    self._supersede(states, prefix, generates=generates)
                if not generates:
                    self._note_lasting(prefix)
            elif slot != last:
                spare.append(slot)
        self._blank += spare
        states.new.clear()
        states.behind.clear()

    def end(self, states: SequenceStates) -> None:
        """Take all slots back from a sequence. Its snapshots stay."""
        if states.has_generated and states.latest is not None:
            self._note_lasting(states.latest)
        self._blank.extend(slot for _, slot in states.new)
        self._blank.extend(slot for slot in states.behind.values() if slot not in states.own)
        states.new.clear()
        states.behind.clear()
        self._leave(states)
        self._blank.extend(states.own)

    def forget(self, prefix: Prefix) -> None:
        """The block of a prefix has other content now, so no sequence can begin behind it."""
        snapshot = prefix.snapshot
        if snapshot is not None:
            prefix.snapshot = None
            del self._snapshots[snapshot.slot]
            self._note(prefix, False)
            if snapshot.slot not in self._num_readers:
                self._blank.append(snapshot.slot)

    # ------------------------------------------------------------------ snapshots from a store

    def reserve(self, before: Prefix | None = None) -> int | None:
        """A slot that a store may fill; None where no sequence could begin behind its snapshot then.

        before: the sequence begins behind this prefix if nothing comes, so its snapshot makes room last.
        """
        if before is not None and before.snapshot is not None:
            self._snapshots.move_to_end(before.snapshot.slot)
        return self._take() if self.num_free > SLOTS_OF_SEQUENCE else None

    def take_back(self, slot: int, prefix: Prefix | None, num_tokens: int) -> None:
        """Take a reserved slot back from the store, which no longer writes into it.

        prefix: the cached prefix of `num_tokens` tokens whose states the slot has; None: it has nothing of use.
        """
        if prefix is None or not self._keep(prefix, slot, num_tokens):
            self._blank.append(slot)

    # ------------------------------------------------------------------

    def _own_from_now_on(self, states: SequenceStates, slot: int) -> list[int]:
        """Have a slot that the step has written as an own one of a sequence. Returns the own slot that it replaces."""
        if slot in states.own:
            return []
        first, second = states.own
        replaced = first if states.next == second else second
        states.own = (states.next, slot)
        return [replaced]

    def _keep(self, prefix: Prefix, slot: int, num_tokens: int) -> bool:
        """Have a slot as the snapshot of a prefix; False where the prefix is gone, or has one."""
        assert prefix.num_tokens == num_tokens, f"a state behind {num_tokens} tokens, a prefix of {prefix.num_tokens}"
        if not prefix.is_held or prefix.snapshot is not None:
            return False
        prefix.snapshot = self._snapshots[slot] = Snapshot(prefix, slot)
        self._note(prefix, True)
        return True

    def _supersede(self, states: SequenceStates, prefix: Prefix, *, generates: bool) -> None:
        """A conversation goes on from its end, so the snapshot that the sequence has made before makes room first.

        Of an answer only the last snapshot stays.
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
        """A slot with nothing in it; None: sequences have them all."""
        if not self._blank:
            unread = (each.prefix for slot, each in self._snapshots.items() if slot not in self._num_readers)
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
            if slot not in self._snapshots:
                self._blank.append(slot)

    def _note(self, prefix: Prefix, is_resumable: bool) -> None:
        if self.note_resumable is not None:
            self.note_resumable(prefix, is_resumable)

    def _note_lasting(self, prefix: Prefix) -> None:
        if self.note_lasting is not None and prefix.snapshot is not None:
            self.note_lasting(prefix)
