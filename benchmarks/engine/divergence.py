"""Find the first difference between a replay and its log, and describe it in words with numbers and a likely reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from app.engine.batch import WaitReason
from app.engine.trace.entries import NOTHING, ScheduledTokens, StepRecord

_MAX_LISTED = 8
_CHANGED = "an earlier entry of the log was changed or is missing, or the code has changed"
_MEMORY = "blocks were shared or freed differently: a prompt differs, or a salt or an abort is missing"
# The fields to compare before and after the drawn tokens: in words, the field, and the likely reason for a difference.
_BEFORE = (
    ("requests joined", "joined", _CHANGED),
    ("blocks of the requests that joined", "blocks", _MEMORY),
    ("free blocks", "num_free_blocks", _MEMORY),
    ("number of waiting requests", "num_waiting", _CHANGED),
    ("reason why the first request waits", "wait_reason", _CHANGED),
)
_AFTER = (
    ("failures", "failures", _CHANGED),
    ("requests ended", "ended", "the end tokens, the request's max_tokens or deadline, or the code has changed"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first difference between the log and the replay."""

    step: int
    what: str  # the kind of difference: requests computed, tokens, blocks, ...
    expected: str  # by the log
    got: str
    likely: str

    def __str__(self) -> str:
        return (
            f"step {self.step} differs: {self.what}\n  log:    {self.expected}\n  replay: {self.got}\n"
            f"  likely: {self.likely}"
        )


class Comparison:
    """Compares the steps of one run, in their order. The scheduled tokens must be in full."""

    def __init__(
        self,
        names: Mapping[int, str],
        *,
        differences: Sequence[str],
        computes: bool,
        hides_tokens: bool = False,
        had_batch_size: bool = False,
    ) -> None:
        """`names`: the requests' ids by number. `computes`: whether a model computes; else tokens come from the log.

        `differences`: where settings, code and versions differ from the log, in words. `had_batch_size`: the
        log is of a former version, in which requests behind a full batch waited for the strategy. Now they wait for
        slots.
        """
        self._names = names
        self._differences = differences
        self._computes = computes
        self._hides_tokens = hides_tokens
        self._had_batch_size = had_batch_size
        self._before = NOTHING
        self._num_drawn: dict[int, int] = {}  # number of tokens drawn, by request number

    def first_difference(self, recorded: StepRecord, made: StepRecord) -> Divergence | None:
        """Return the first difference, or None if the replay made this step as recorded."""
        if self._had_batch_size and (recorded.wait_reason, made.wait_reason) == (WaitReason.STRATEGY, WaitReason.SLOTS):
            recorded = recorded._replace(wait_reason=WaitReason.SLOTS)
        for what, expected, got, likely in self._all_differences(recorded, made):
            if self._differences:
                likely = f"the set-up of the replay differs ({'; '.join(self._differences)}); otherwise {likely}"
            return Divergence(step=recorded.number, what=what, expected=expected, got=got, likely=likely)
        return None

    def _all_differences(self, recorded: StepRecord, made: StepRecord) -> Iterable[tuple[str, str, str, str]]:
        """Yield (what, expected, got, likely) for each difference. Causes come before their consequences."""
        scheduled, before = recorded.scheduled or NOTHING, self._before
        self._before = scheduled
        for what, name in (("scheduled", "began_at"), ("booked", "ended_at")):
            expected, got = (getattr(each, name) is not None for each in (recorded, made))
            if expected != got:
                yield f"whether a step was {what}", str(expected), str(got), _CHANGED
        if recorded.preempted != made.preempted:
            expected_names, got_names = map(self._all_named, (recorded.preempted, made.preempted))
            yield "requests preempted", expected_names, got_names, _CHANGED
        for row, other in zip_longest(_rows(scheduled), _rows(made.scheduled or NOTHING)):
            if row != other:
                yield "requests computed, and their tokens", self._row(row), self._row(other), _CHANGED
        yield from _fields(_BEFORE, recorded, made)
        if not self._hides_tokens:
            yield from self._tokens(recorded, made, scheduled, before)
        yield from _fields(_AFTER, recorded, made)

    def _tokens(
        self, recorded: StepRecord, made: StepRecord, scheduled: ScheduledTokens, before: ScheduledTokens
    ) -> Iterable[tuple[str, str, str, str]]:
        if self._computes:
            likely = "all inputs of this token were the same; the weights, their number type or the machine has changed"
        else:
            likely = "this replay takes its tokens from the log, so the log contradicts itself: it was edited"
        for drawn, redrawn in zip_longest(recorded.drawn(scheduled, before), made.drawn(scheduled, before)):
            number, _ = drawn or redrawn or (0, 0)
            self._num_drawn[number] = self._num_drawn.get(number, 0) + 1
            if drawn != redrawn:
                what = f"token {self._num_drawn[number]} of {self._named(number)}"
                yield what, str(drawn and drawn[1]), str(redrawn and redrawn[1]), likely

    def _row(self, row: tuple[int, int, int, bool] | None) -> str:
        if row is None:
            return "none"
        number, start, count, is_silent = row
        tokens = f"token {start}" if count == 1 else f"tokens {start} to {start + count - 1}"
        return f"{self._named(number)} computes {tokens}{' and draws none' if is_silent else ''}"

    def _named(self, number: int) -> str:
        name = self._names.get(number)
        return f"request {number}" if name is None else f"request {number} ({name})"

    def _all_named(self, numbers: Sequence[int]) -> str:
        listed = ", ".join(map(self._named, numbers[:_MAX_LISTED])) or "none"
        return listed if len(numbers) <= _MAX_LISTED else f"{listed} and {len(numbers) - _MAX_LISTED} more"


def _fields(
    fields: Iterable[tuple[str, str, str]], recorded: StepRecord, made: StepRecord
) -> Iterable[tuple[str, str, str, str]]:
    for what, name, likely in fields:
        expected, got = getattr(recorded, name), getattr(made, name)
        if _lists(expected) != _lists(got):
            yield what, str(expected), str(got), likely


def _rows(scheduled: ScheduledTokens) -> list[tuple[int, int, int, bool]]:
    counts, unsampled = scheduled.counts or [1] * len(scheduled.numbers), set(scheduled.unsampled)
    return [
        (number, start, count, index in unsampled)
        for index, (number, start, count) in enumerate(zip(scheduled.numbers, scheduled.starts, counts, strict=True))
    ]


def _lists(value: object) -> object:
    """Return the value with lists in place of tuples, because JSON turns tuples into lists."""
    return [_lists(each) for each in value] if isinstance(value, list | tuple) else value


def differences_between(recorded: Mapping[str, object], here: Mapping[str, object], path: str = "") -> Iterable[str]:
    """Yield `scheduler.policy.name: sjf in the log, fcfs here` for every leaf that differs between two trees."""
    for name in dict.fromkeys((*recorded, *here)):
        before, now = recorded.get(name), here.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            if before.get("name") != now.get("name"):  # another strategy or policy has other parameters
                before, now = {"name": before.get("name")}, {"name": now.get("name")}
            yield from differences_between(before, now, f"{path}{name}.")
        elif before != now:
            yield f"{path}{name}: {before} in the log, {now} here"
