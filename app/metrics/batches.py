"""What the process of batches counts, for /metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """Since that process has opened its folder; only what is pending is of this moment."""

    num_lines_completed: int
    num_lines_failed: int
    num_webhook_attempts: int
    num_webhooks_delivered: int
    num_webhooks_given_up: int
    num_webhooks_pending: int
