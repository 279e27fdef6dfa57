"""Where a replay first does something else than the log says, in words with numbers, and why that is likely so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TypeVar

from app.engine.trace.entries import NOTHING, ScheduledTokens, StepRecord

T = TypeVar("T")

_MAX_LISTED = 8
_WHOLE_BATCHES = ("static", "dynamic", "bucketed", "sorted", "adaptive")
_BY_THE_CLOCK = ("sjf", "priority", "deadline")


@dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """What may make a replay differ: how it was set up, against how the log was made."""

    differences: Sequence[str]  # of settings, code and versions, in words
    computes: bool  # by a model; else tokens are those of the log
    strategy: str
    policy: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """The first difference between the log and the replay."""

    step: int
    what: str  # the kind: requests computed, tokens, blocks, ...
    expected: str  # by the log
    got: str
    likely: str

    def __str__(self) -> str:
        return (
            f"step {self.step} differs: {self.what}\n  log:    {self.expected}\n  replay: {self.got}\n"
            f"  likely: {self.likely}"
        )


class Comparison:
    """Compares the steps of one run, in their order. Shares are in full."""

    def __init__(self, circumstances: Circumstances, names: Mapping[int, str], *, hides_tokens: bool = False) -> None:
        """`names` are the requests' ids by number."""
        self._circumstances = circumstances
        self._names = names
        self._hides_tokens = hides_tokens
        self._before = NOTHING
        self._num_drawn: dict[int, int] = {}  # tokens so far, by number

    def reconfigured(self, strategy: str, policy: str) -> None:
        """Other rules hold from the next step on."""
        known = self._circumstances
        self._circumstances = Circumstances(
            differences=known.differences, computes=known.computes, strategy=strategy, policy=policy
        )

    def first_difference(self, recorded: StepRecord, made: StepRecord) -> Divergence | None:
        """None when the replay made this step as it is recorded."""
        scheduled, before = recorded.scheduled or NOTHING, self._before
        self._before = scheduled
        differences = (
            self._clock(recorded, made),
            self._plain("requests preempted", recorded.preempted, made.preempted, self._all_named, self._decision()),
            self._scheduled(scheduled, made.scheduled or NOTHING),
            self._plain("requests joined", recorded.joined, made.joined, self._all_named, self._decision()),
            self._plain("blocks of the requests that joined", recorded.blocks, made.blocks, str, self._memory()),
            self._plain("free blocks", recorded.num_free_blocks, made.num_free_blocks, str, self._memory()),
            self._plain("how many wait", recorded.num_waiting, made.num_waiting, str, self._decision()),
            self._plain("why the first one waits", recorded.wait_reason, made.wait_reason, str, self._decision()),
            None if self._hides_tokens else self._tokens(recorded, made, scheduled, before),
            self._plain("what failed", recorded.failures, made.failures, str, self._decision()),
            self._plain("requests ended", recorded.ended, made.ended, self._endings, self._ending()),
        )
        found = next((difference for difference in differences if difference is not None), None)
        if found is None:
            return None
        what, expected, got, likely = found
        return Divergence(step=recorded.number, what=what, expected=expected, got=got, likely=likely)

    # ------------------------------------------------------------------ what differs

    def _clock(self, recorded: StepRecord, made: StepRecord) -> _Found | None:
        """Whether the engine scheduled a step at all, and lived to book it."""
        words = {True: "the engine scheduled", False: "the engine only waited for the step before"}
        scheduled = (recorded.began_at is not None, made.began_at is not None)
        if scheduled[0] != scheduled[1]:
            return "whether a step was scheduled", words[scheduled[0]], words[scheduled[1]], self._decision()
        words = {True: "the step was booked", False: "all of the step failed"}
        booked = (recorded.ended_at is not None, made.ended_at is not None)
        if booked[0] != booked[1]:
            return "whether a step was booked", words[booked[0]], words[booked[1]], self._decision()
        return None

    def _scheduled(self, recorded: ScheduledTokens, made: ScheduledTokens) -> _Found | None:
        for place, (expected, got) in enumerate(zip_longest(_rows(recorded), _rows(made)), start=1):
            if expected != got:
                what = f"requests computed, and their tokens (place {place} of {len(recorded.numbers)})"
                return what, self._row(expected), self._row(got), self._decision()
        return None

    def _tokens(
        self, recorded: StepRecord, made: StepRecord, scheduled: ScheduledTokens, before: ScheduledTokens
    ) -> _Found | None:
        drawn, redrawn = recorded.drawn(scheduled, before), made.drawn(scheduled, before)
        for expected, got in zip_longest(drawn, redrawn):
            if expected != got:
                number = (expected or got or (0, 0))[0]
                what = f"token {self._num_drawn.get(number, 0) + 1} of {self._named(number)}"
                return what, _token(expected), _token(got), self._token_reason()
            self._num_drawn[expected[0]] = self._num_drawn.get(expected[0], 0) + 1
        return None

    def _plain(self, what: str, expected: T, got: T, words: Callable[[T], str], likely: str) -> _Found | None:
        if _lists(expected) == _lists(got):
            return None
        return what, words(expected), words(got), likely

    # ------------------------------------------------------------------ in words

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
        if not numbers:
            return "none"
        listed = ", ".join(map(self._named, numbers[:_MAX_LISTED]))
        return listed if len(numbers) <= _MAX_LISTED else f"{listed} and {len(numbers) - _MAX_LISTED} more"

    def _endings(self, ended: Sequence[tuple[int, str]]) -> str:
        return ", ".join(f"{self._named(number)}: {reason}" for number, reason in ended) or "none"

    # ------------------------------------------------------------------ why

    def _token_reason(self) -> str:
        if not self._circumstances.computes:
            return "tokens are those of the log in this replay, so its lines contradict each other: it was edited"
        known = "everything that it was computed from was the same until here; "
        return known + self._set_up("the model's weights, its number type or the machine are others")

    def _decision(self) -> str:
        rules = self._circumstances
        timed = [name for name in (rules.strategy,) if name in _WHOLE_BATCHES]
        timed += [name for name in (rules.policy,) if name in _BY_THE_CLOCK]
        otherwise = "an entry before this step was changed or is missing, or the code is another"
        if timed:
            otherwise = (
                f"{' and '.join(timed)} decide{'s' * (len(timed) == 1)} by times as well, and the log's times are told "
                f"again: a time or a deadline in it was changed, or the code is another"
            )
        return self._set_up(otherwise)

    def _memory(self) -> str:
        return self._set_up("blocks were shared or given back otherwise: another prompt, a salt or an abort is missing")

    def _ending(self) -> str:
        return self._set_up("other end tokens, another max_tokens or deadline of the request, or another code")

    def _set_up(self, otherwise: str) -> str:
        differences = self._circumstances.differences
        if not differences:
            return otherwise
        return f"the replay is set up otherwise ({'; '.join(differences)}); if that is not why, {otherwise}"


_Found = tuple[str, str, str, str]  # what, expected, got, likely


def _rows(scheduled: ScheduledTokens) -> list[tuple[int, int, int, bool]]:
    counts, unsampled = scheduled.counts or [1] * len(scheduled.numbers), set(scheduled.unsampled)
    return [
        (number, start, count, index in unsampled)
        for index, (number, start, count) in enumerate(zip(scheduled.numbers, scheduled.starts, counts, strict=True))
    ]


def _token(drawn: tuple[int, int] | None) -> str:
    return "none" if drawn is None else f"{drawn[1]}"


def _lists(value: object) -> object:
    """Read from JSON, tuples have become lists."""
    return [_lists(each) for each in value] if isinstance(value, list | tuple) else value


def differences_between(recorded: Mapping[str, object], here: Mapping[str, object], path: str = "") -> Iterable[str]:
    """`scheduler.policy.name: sjf in the log, fcfs here` for every leaf of two trees that differs."""
    for name in dict.fromkeys((*recorded, *here)):
        before, now = recorded.get(name), here.get(name)
        if isinstance(before, dict) and isinstance(now, dict):
            if before.get("name") != now.get("name"):  # another rule has other parameters
                before, now = {"name": before.get("name")}, {"name": now.get("name")}
            yield from differences_between(before, now, f"{path}{name}.")
        elif before != now:
            yield f"{path}{name}: {before} in the log, {now} here"
