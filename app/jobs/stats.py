"""What an owner's batches have to do and have done, for a glance."""

from __future__ import annotations

from collections.abc import Sequence

from app.jobs.catalog import StatusCount
from app.jobs.job import Status
from app.jobs.line import Json


def stats_object(counts: Sequence[StatusCount], num_in_flight: int, tokens_per_second: float) -> Json:
    """Batches by status, requests by what became of them, tokens. A batch that is still validated has no requests."""
    waiting = sum(
        count.num_lines - count.num_completed - count.num_failed for count in counts if not count.status.has_ended
    )
    return {
        "object": "batch.stats",
        "batches": dict.fromkeys((status.value for status in Status), 0)
        | {count.status.value: count.num_batches for count in counts},
        "requests": {
            "queued": max(0, waiting - num_in_flight),
            "running": num_in_flight,
            "completed": sum(count.num_completed for count in counts),
            "failed": sum(count.num_failed for count in counts),
        },
        "tokens": {
            "input": sum(count.num_input_tokens for count in counts),
            "output": sum(count.num_output_tokens for count in counts),
        },
        "output_tokens_per_second": round(tokens_per_second, 3),
    }
