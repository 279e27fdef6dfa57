"""The entries of a step log, and their encoding as lines of JSON. Does not access files.

The external events (arrivals, aborts, new settings, clock readings, drawn tokens, failures) and the tuner's limits are
sufficient to replay a run. The decisions are recorded to check that they are the same in the replay. Requests are
numbered in order of arrival. Empty, zero and false fields are omitted.

    {"step_log": 2, "run": ..., "part": 1, ...}                    the header, first in every file
    {"arrival": 7, "at": 3.1, "request": {"request_id": ..., "prompt_token_ids": [...], "sampling": {...}, ...}}
    {"abort": 7}
    {"reconfigured": {"strategy": {...}, ...}, "settings": "mixed-continuous-fcfs-0a1b2c3d"}
    {"limits": {"max_step_tokens": 176, "prefill_chunk_tokens": 176, "max_running": 32}}
    {"cache_cleared": true}
    {"asleep": true}                                               asleep until an entry with false
    {"step": 12, "began_at": 3.2, "ended_at": 3.3, "scheduled": {...}, "token_ids": [...], "joined": [7], ...}
    {"lost": 40}                                                   40 entries were dropped at this point
    {"output": 7, "block_hashes": [...]}                          in a log without prompts, see `redaction.py`
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from itertools import chain, repeat
from typing import Any, NamedTuple

import msgspec

from app.config import SchedulerConfig
from app.engine.batch import StepLimits, WaitReason
from app.engine.request import Request, SamplingParams

FORMAT = 2
UNKNOWN = -1  # the number of a request that is no longer known


class FailureKind(StrEnum):
    """How a step failed."""

    REQUESTS = "requests"  # the listed requests are at fault; if none, the whole step failed but its parts succeeded
    DEVICE = "device"  # no part of the step could be computed, and all of its requests have ended
    LAUNCH = "launch"  # the launch failed, in an engine that launches ahead, and the step will be retried
    RESULT = "result"  # like LAUNCH, but the failure occurred while waiting for the result
    MATCHERS = "matchers"  # the listed requests' matchers can no longer compute the allowed tokens


class StepFailure(NamedTuple):
    how: FailureKind
    numbers: list[int]  # numbers of the requests that ended because of the failure


class ScheduledTokens(NamedTuple):
    """The tokens to compute in a step, as columns: request `numbers[i]` has `counts[i]` tokens from `starts[i]` on."""

    numbers: Sequence[int] = ()
    starts: Sequence[int] = ()
    counts: Sequence[int] | None = None  # None for one token each
    unsampled: Sequence[int] = ()  # indices of the sequences for which no token is drawn

    @property
    def samplers(self) -> list[int]:
        """The numbers of the requests for which a token is drawn, in the order of the recorded tokens."""
        unsampled = set(self.unsampled)
        return [number for index, number in enumerate(self.numbers) if index not in unsampled]

    def next_decode_step(self) -> ScheduledTokens:
        """Return the next step of the same sequences, in which each computes the token that was just drawn for it."""
        counts = self.counts or [1] * len(self.starts)
        starts = [start + count for start, count in zip(self.starts, counts, strict=True)]
        return ScheduledTokens(self.numbers, starts)


NOTHING = ScheduledTokens()


class StepRecord(NamedTuple):
    """One call of `Engine.step`. Times are readings of the engine's clock, or None if the clock was not read."""

    number: int  # from 1
    began_at: float | None = None
    ended_at: float | None = None
    scheduled: ScheduledTokens | None = None  # None stands for `next_decode_step` of the previous step
    token_ids: Sequence[int] = ()  # drawn tokens, in the order of the sampled sequences
    is_late: bool = False  # whether `token_ids` belong to the previous step, because this one was launched ahead
    joined: Sequence[int] = ()
    blocks: Sequence[list[int]] = ()  # block ids of the joined sequences, including the blocks of this step
    preempted: Sequence[int] = ()
    ended: Sequence[tuple[int, str]] = ()  # (number, finish reason or the class of an error)
    num_waiting: int = 0  # like the next two fields, the value after the step was scheduled
    wait_reason: WaitReason | None = None  # why the first waiting sequence did not join
    num_free_blocks: int = 0
    times_us: Sequence[int] = ()  # to schedule, to run or wait for the device, to process the result
    failures: Sequence[StepFailure] = ()
    # In a step with drafts, how many of `token_ids` each sequence got. All scheduled tokens but its first are drafts.
    num_kept: Sequence[int] = ()
    # The fetches from a store that began with this step, as (number, requested blocks), and those that finished before
    # it, as (number, usable blocks). A replay does not need a store.
    fetching: Sequence[tuple[int, int]] = ()
    fetched: Sequence[tuple[int, int]] = ()

    def drawn(self, scheduled: ScheduledTokens, before: ScheduledTokens) -> list[tuple[int, int]]:
        """Return (number, token) for every drawn token, given the scheduled tokens of this and the previous step."""
        samplers = (before if self.is_late else scheduled).samplers
        if self.num_kept:
            samplers = list(chain.from_iterable(map(repeat, samplers, self.num_kept)))
        return list(zip(samplers, self.token_ids, strict=False))


class Arrival(NamedTuple):
    number: int
    at: float
    request: Request


class RedactedArrival(NamedTuple):
    """An arrival without its prompt. `block_hashes` contains a hash for each full block of the prompt."""

    number: int
    at: float
    request: dict[str, Any]  # as in Arrival, but with `num_prompt_tokens` and `block_hashes` instead of the tokens


class OutputHashes(NamedTuple):
    """The hashes of a redacted request's full blocks after those in its arrival. Written when the request ends."""

    number: int
    block_hashes: list[str]


class Abort(NamedTuple):
    number: int


class Reconfigured(NamedTuple):
    config: SchedulerConfig


class Limited(NamedTuple):
    limits: StepLimits


class CacheCleared(NamedTuple):
    pass


class Asleep(NamedTuple):
    is_asleep: bool


class DroppedEntries(NamedTuple):
    num_entries: int


Entry = (
    StepRecord | Arrival | RedactedArrival | OutputHashes | Abort | Reconfigured | Limited | CacheCleared
    | Asleep | DroppedEntries
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """A log's engine and machine. All files of a log have the same `run` and are numbered from 1 by `part`."""

    step_log: int = FORMAT
    run: str
    part: int = 1
    began: str  # wall-clock time, ISO 8601
    launches_ahead: bool
    num_blocks: int
    facts: dict[str, Any]  # the fields of ModelInfo
    config: dict[str, Any]  # the fields of EngineConfig
    versions: dict[str, str | None]
    commit: str | None
    settings: str = ""  # `SchedulerConfig.version` of the config

    def to_line(self) -> str:
        return _dumps(asdict(self))

    @classmethod
    def parse(cls, line: str) -> Header:
        """Parse a header. Raises ValueError, with an explanation, if the line is not a header in this format."""
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            found = None
        if not isinstance(found, dict) or "step_log" not in found:
            raise ValueError("this is not a step log: its first line is not a header")
        if found["step_log"] != FORMAT:
            raise ValueError(f"the log has format {found['step_log']}; this version reads format {FORMAT}")
        names = {field.name for field in fields(cls)}
        if found.keys() | {"settings"} != names:  # older logs do not have `settings`
            raise ValueError(f"the header has missing or unknown fields: {', '.join(sorted(found.keys() ^ names))}")
        return cls(**found)


def to_line(entry: Entry) -> str:
    """Return the entry as a line of JSON, without a newline."""
    match entry:
        case StepRecord():
            return _dumps(_step_fields(entry))
        case Arrival():
            return _dumps({"arrival": entry.number, "at": entry.at, "request": request_fields(entry.request)})
        case RedactedArrival():
            return _dumps({"arrival": entry.number, "at": entry.at, "request": entry.request})
        case OutputHashes():
            return _dumps({"output": entry.number, "block_hashes": entry.block_hashes})
        case Abort():
            return _dumps({"abort": entry.number})
        case Reconfigured():
            config = entry.config
            return _dumps({"reconfigured": config.model_dump(mode="json"), "settings": config.version})
        case Limited():
            return _dumps({"limits": entry.limits._asdict()})
        case CacheCleared():
            return _dumps({"cache_cleared": True})
        case Asleep():
            return _dumps({"asleep": entry.is_asleep})
        case DroppedEntries():
            return _dumps({"lost": entry.num_entries})


def parse(line: str) -> Entry:
    """Parse the entry in a line. Raises ValueError, TypeError or KeyError if the line is not an entry."""
    found: dict[str, Any] = json.loads(line)
    if "step" in found:
        return _step(found)
    match found:
        case {"arrival": number, "at": at, "request": {"prompt_token_ids": _} as request}:
            return Arrival(number, at, msgspec.convert(request, Request))
        case {"arrival": number, "at": at, "request": {"num_prompt_tokens": _, "block_hashes": _} as request}:
            return RedactedArrival(number, at, request)
        case {"output": number, "block_hashes": hashes}:
            return OutputHashes(number, hashes)
        case {"abort": number}:
            return Abort(number)
        case {"reconfigured": config}:
            return Reconfigured(SchedulerConfig.model_validate(without_batch_size(config)))
        case {"limits": limits}:
            return Limited(StepLimits(**limits))
        case {"cache_cleared": True}:
            return CacheCleared()
        case {"asleep": is_asleep}:
            return Asleep(bool(is_asleep))
        case {"lost": num_entries}:
            return DroppedEntries(num_entries)
    raise ValueError(f"unknown entry: {line[:80]}")


def without_batch_size(scheduler: dict[str, Any]) -> dict[str, Any]:
    """Return recorded settings without `strategy.batch_size`, which older versions used instead of `max_running`."""
    strategy = dict(scheduler["strategy"])
    batch_size = strategy.pop("batch_size", None)
    if batch_size is None:
        return scheduler
    return scheduler | {"strategy": strategy, "max_running": min(batch_size, scheduler["max_running"])}


def request_fields(request: Request) -> dict[str, Any]:
    """Return a request's fields except defaults and `prefix_at`, which contains a secret.

    Unlike `asdict`, this function does not copy the prompt token by token.
    """
    sampling = _non_default_fields(request.sampling)
    if request.sampling.grammar is not None:
        sampling["grammar"] = asdict(request.sampling.grammar)
    adapter = {} if request.adapter is None else {"adapter": asdict(request.adapter)}
    found = _non_default_fields(request) | {"sampling": sampling} | adapter
    found.pop("prefix_at", None)
    return found


_dumps = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode


def _non_default_fields(given: Request | SamplingParams) -> dict[str, Any]:
    values = {each.name: (getattr(given, each.name), each.default) for each in fields(given)}
    return {name: value for name, (value, default) in values.items() if value != default}


def _step_fields(record: StepRecord) -> dict[str, Any]:
    values: dict[str, Any] = {"step": record.number, "began_at": record.began_at, "ended_at": record.ended_at}
    values |= {name: value for name, value in zip(record._fields[3:], record[3:], strict=True) if value}
    if record.scheduled is not None:
        values["scheduled"] = {name: value for name, value in record.scheduled._asdict().items() if value}
    return values


def _step(values: dict[str, Any]) -> StepRecord:
    number = values.pop("step")
    if "scheduled" in values:
        values["scheduled"] = ScheduledTokens(**values["scheduled"])
    if "wait_reason" in values:
        values["wait_reason"] = WaitReason(values["wait_reason"])
    for name in ("fetching", "fetched"):
        values[name] = [(number, num_blocks) for number, num_blocks in values.get(name, ())]
    values["ended"] = [(each, str(reason)) for each, reason in values.get("ended", ())]
    values["failures"] = [StepFailure(FailureKind(how), numbers) for how, numbers in values.get("failures", ())]
    return StepRecord(number, **values)
