"""Finding the requests that make a step fail, by running its halves. No state changes when a run fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from app.engine.batch import Batch
from app.engine.sequence import Sequence

logger = logging.getLogger(__name__)

# So many single requests that fail, and not one run that succeeds: then it is the device and not the requests.
MAX_LONE_FAILURES = 4

Run = Callable[[Batch], list[int]]


class DeviceFailed(Exception):
    """Every part of a batch fails, so none of its requests is to blame."""


@dataclass(slots=True)
class Isolated:
    """What a failed batch gave when it was run in parts."""

    token_ids: dict[str, int] = field(default_factory=dict)  # by request id
    culprits: list[tuple[Sequence, Exception]] = field(default_factory=list)
    has_succeeded: bool = False  # at least one part was computed


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
    for part in (slice(None, middle), slice(middle, None)):
        half = Batch(batch.scheduled[part], batch.sequences[part], began_at=batch.began_at)
        try:
            token_ids = run(half)
        except Exception as failure:
            logger.debug("a part of %d requests fails too: %r", len(half.scheduled), failure)
            _split(run, half, failure, found)
        else:
            found.has_succeeded = True
            found.token_ids |= {
                item.request_id: token_id for item, token_id in zip(half.sampled, token_ids, strict=True)
            }
