"""Finds the requests that make a step fail by running halves of the batch, and rejects these if they are sent again."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Callable
from dataclasses import astuple, dataclass, field, replace
from itertools import repeat
from typing import ParamSpec, TypeVar

from app.culprits import Culprits
from app.engine.batch import DeviceLost, StepBatch, StepResult
from app.engine.request import Request, TokenLogprobs
from app.engine.sequence import EngineSequence
from app.errors import described

logger = logging.getLogger(__name__)


MAX_REMEMBERED = 4_096

Run = Callable[[StepBatch], StepResult]
P = ParamSpec("P")
T = TypeVar("T")


_AT_FAULT = repeat(0)


class DeviceFailed(Exception):
    """Every part of a batch fails, so the device is at fault, not a request."""


@dataclass(slots=True)
class IsolationResult:
    """The results of a failed batch that was run in parts. The mappings are by request id."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)
    logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    pooled: dict[str, list[float]] = field(default_factory=dict)
    culprits: list[tuple[EngineSequence, Exception]] = field(default_factory=list)
    has_succeeded: bool = False  # whether any part succeeded

    def add(self, part: StepBatch, result: StepResult) -> None:
        self.has_succeeded = True
        for item, token_id in zip(part.sampled, result.token_ids, strict=True):
            self.token_ids.setdefault(item.request_id, []).append(token_id)
        self.logprobs |= result.logprobs
        self.prompt_logprobs |= result.prompt_logprobs
        self.pooled |= result.pooled

    def result(self, batch: StepBatch) -> StepResult:
        """Return the result of the whole batch. Requests at fault get token 0; the caller must end them."""
        drawn = {request_id: iter(token_ids) for request_id, token_ids in self.token_ids.items()}
        token_ids = [next(drawn.get(item.request_id, _AT_FAULT)) for item in batch.sampled]
        return StepResult(token_ids, self.logprobs, self.prompt_logprobs, self.pooled)


def run_or_error(compute: Callable[P, T], *given: P.args, **named: P.kwargs) -> T | Exception:
    """Call a model runner, and return its result or the error that it raised. A request may have caused the error.

    Raises:
        DeviceLost: `compute` raised it. No request is at fault, and retrying is useless.
    """
    try:
        return compute(*given, **named)
    except DeviceLost:
        raise
    except Exception as error:
        return error


def run_in_parts(run: Run, batch: StepBatch, error: Exception) -> IsolationResult:
    """Compute a batch that failed with `error` in halves, recursively, until only the requests at fault still fail.

    Computing a request twice writes the same KV to the same slots, and its tokens do not depend on other requests. The
    requests that are not at fault therefore get the same tokens as in the whole step.

    Raises:
        DeviceFailed: no part could be computed.
        DeviceLost: `run` raised it.
    """
    found = IsolationResult()
    _split(run, batch, error, found)
    if not found.has_succeeded:
        raise DeviceFailed
    return found


def _split(run: Run, batch: StepBatch, error: Exception, found: IsolationResult) -> None:
    # If this many single requests have failed and no part has succeeded, the device is at fault.
    max_lone_failures = 4
    if len(batch.scheduled) == 1:
        found.culprits.append((batch.sequences[0], error))
        if len(found.culprits) >= max_lone_failures and not found.has_succeeded:
            raise DeviceFailed
        return
    middle = len(batch.scheduled) // 2
    for half in (batch.part(slice(None, middle)), batch.part(slice(middle, None))):
        result = run_or_error(run, half)
        if isinstance(result, Exception):
            logger.debug("a part of %d requests failed too: %s", len(half.scheduled), described(result))
            _split(run, half, result, found)
        else:
            found.add(half, result)


class Quarantine:
    """Counts failures for each pair of prompt and sampling parameters, in bounded memory.

    Only the engine's thread may write, but `holds` may be called from any thread.
    """

    def __init__(self) -> None:
        max_failures = 2  # after this many failures, equal requests are rejected
        self._culprits: Culprits[bytes] = Culprits(max_losses=max_failures, max_remembered=MAX_REMEMBERED)

    def note_failure(self, request: Request) -> None:
        """Record that a step failed, probably because of this request."""
        self._culprits.note_loss(_digest(request))

    def holds(self, request: Request) -> bool:
        """Whether the request is rejected, because equal requests have failed too often."""
        return len(self._culprits) > 0 and self._culprits.is_culprit(_digest(request))


def _digest(request: Request) -> bytes:
    # The digest excludes the seed, because a request without a seed gets a new one at every attempt.
    sampling = astuple(replace(request.sampling, seed=0))
    text = hashlib.blake2b(array("q", request.prompt_token_ids).tobytes(), digest_size=16)
    text.update(repr((sampling, request.prefix_salt)).encode())
    return text.digest()
