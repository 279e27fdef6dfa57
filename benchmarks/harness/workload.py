"""Reads workload files, which have one request per line as JSON. Messages name the line of a mistake."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from app.engine.request import FILTERS, MAX_DEADLINE_S, MAX_PRIORITY, MAX_TENANT_LENGTH, Request, SamplingParams
from benchmarks.harness.command import BenchmarkError, did_you_mean

WARM_UP_REQUESTS = 32
WARM_UP_TOKENS = 16

_TokenId = Annotated[int, Field(ge=0)]


class _Line(BaseModel):
    """The fields of a line without `FILTERS`. A request without a temperature is greedy."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str = Field(min_length=1)
    prompt_token_ids: tuple[_TokenId, ...] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    arrival_s: float = Field(0.0, ge=0, allow_inf_nan=False)
    ignore_eos: bool = False
    temperature: float = Field(0.0, ge=0, allow_inf_nan=False)
    seed: int = Field(0, ge=0, lt=2**63)
    tenant: str = Field("", max_length=MAX_TENANT_LENGTH)
    priority: int = Field(0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)
    deadline_s: float | None = Field(None, gt=0, le=MAX_DEADLINE_S)

    def timed_request(self) -> TimedRequest:
        sampling = SamplingParams(**self.model_dump(include=_SAMPLING))
        request = Request(request_id=self.id, sampling=sampling, **self.model_dump(include=_REQUEST))
        return TimedRequest(request=request, arrival_s=self.arrival_s)


_SAMPLING = {"max_tokens", "temperature", "seed", "ignore_eos", *FILTERS}
_REQUEST = {"prompt_token_ids", "tenant", "priority", "deadline_s"}
_FILTERS: dict[str, Any] = {
    each.name: (type(each.default), Field(each.default, ge=0, allow_inf_nan=False))
    for each in fields(SamplingParams)
    if each.name in FILTERS
}
_FullLine = create_model("_FullLine", __base__=_Line, **_FILTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRequest:
    """A request and its arrival time, in seconds after the start."""

    request: Request
    arrival_s: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def max_tokens(self) -> int:
        return self.request.sampling.max_tokens

    @property
    def max_total_tokens(self) -> int:
        return self.num_prompt_tokens + self.max_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival. Requests with equal arrival times have the order of the file."""

    requests: tuple[TimedRequest, ...]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(timed.num_prompt_tokens for timed in self.requests)

    def warm_up(self) -> Workload:
        """Return the first requests, shortened and all at time 0: enough to compile kernels and touch all memory."""
        return Workload(tuple(_shortened(timed) for timed in self.requests[:WARM_UP_REQUESTS]))


def read_workload(path: str) -> Workload:
    """Read a workload file.

    Raises:
        BenchmarkError: the file cannot be read, a line is wrong (the message has its number), or two ids are equal.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchmarkError(f"the workload {path} cannot be read: {error}") from error
    numbers: dict[str, int] = {}  # request id → line
    lines: list[_Line] = []
    for number, content in enumerate(text.split("\n"), start=1):
        if not content.strip():
            continue
        line = _parse(content, place=f"{path}:{number}")
        if line.id in numbers:
            raise BenchmarkError(f"{path}:{number}: the id {line.id!r} is already used in line {numbers[line.id]}")
        numbers[line.id] = number
        lines.append(line)
    if not lines:
        raise BenchmarkError(f"the workload {path} has no requests")
    return Workload(tuple(sorted((line.timed_request() for line in lines), key=lambda timed: timed.arrival_s)))


def read_workloads(paths: Iterable[str]) -> dict[str, Workload]:
    """Read several files, by name without folder and suffix. Raises BenchmarkError, for two equal names as well."""
    found: dict[str, Workload] = {}
    for path in paths:
        name = Path(path).stem
        if name in found:
            raise BenchmarkError(f"two workloads are named {name}; rename the file {path}")
        found[name] = read_workload(path)
    return found


def _parse(content: str, *, place: str) -> _Line:
    try:
        return _FullLine.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        raise BenchmarkError(f"{place}: {_in_words(first['type'], first['loc'], first['msg'])}") from error


def _in_words(kind: str, location: Sequence[int | str], message: str) -> str:
    where = ".".join(str(part) for part in location)
    if kind == "extra_forbidden":
        return f"there is no field {where!r}{did_you_mean(where, _FullLine.model_fields)}"
    return f"{where}: {message}" if where else message


def _shortened(timed: TimedRequest) -> TimedRequest:
    request = timed.request
    sampling = replace(request.sampling, max_tokens=min(request.sampling.max_tokens, WARM_UP_TOKENS))
    return TimedRequest(request=replace(request, sampling=sampling))
