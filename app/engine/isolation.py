"""Finding the requests that make a step fail, by running its halves. No state changes when a run fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from app.engine.batch import Batch, StepResult
from app.engine.request import TokenLogprobs
from app.engine.sequence import Sequence

logger = logging.getLogger(__name__)

# So many single requests that fail, and not one run that succeeds: then it is the device and not the requests.
MAX_LONE_FAILURES = 4

Run = Callable[[Batch], StepResult]


class DeviceFailed(Exception):
    """Every part of a batch fails, so none of its requests is to blame."""


@dataclass(slots=True)
class Isolated:
    """What a failed batch gave when it was run in parts."""

    token_ids: dict[str, int] = field(default_factory=dict)  # by request id, as the next two
    logprobs: dict[str, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    culprits: list[tuple[Sequence, Exception]] = field(default_factory=list)
    has_succeeded: bool = False  # at least one part was computed

    def add(self, part: Batch, result: StepResult) -> None:
        """A part of the batch could be computed."""
        self.has_succeeded = True
        for item, token_id in zip(part.sampled, result.token_ids, strict=True):
            self.token_ids[item.request_id] = token_id
        self.logprobs |= result.logprobs
        self.prompt_logprobs |= result.prompt_logprobs

    def result(self, batch: Batch) -> StepResult:
        """As of the whole batch. A token is asked of every sampled one; nobody sees that of a request at fault."""
        token_ids = [self.token_ids.get(item.request_id, 0) for item in batch.sampled]
        return StepResult(token_ids, self.logprobs, self.prompt_logprobs)


def run_in_parts(run: Run, batch: Batch, error: Exception) -> Isolated:
    """Compute a batch that failed with `error` in halves, and theirs, until only the requests at fault still fail.

    A part that has been computed twice has written the same KV to the same slots, and what is drawn depends on
    nothing but the request, so the others' tokens are those that the whole step would have given.

    Raises:
        DeviceFailed: no part can be computed.
    """
    found = Isolated()
    _split(run, batch, error, found)
    if not found.has_succeeded:
        raise DeviceFailed
    return found


def _split(run: Run, batch: Batch, error: Exception, found: Isolated) -> None:
    if len(batch.scheduled) == 1:
        found.culprits.append((batch.sequences[0], error))
        if len(found.culprits) >= MAX_LONE_FAILURES and not found.has_succeeded:
            raise DeviceFailed
        return
    middle = len(batch.scheduled) // 2
    for half in (batch.part(slice(None, middle)), batch.part(slice(middle, None))):
        try:
            result = run(half)
        except Exception as failure:
            logger.debug("a part of %d requests fails too: %r", len(half.scheduled), failure)
            _split(run, half, failure, found)
        else:
            found.add(half, result)
