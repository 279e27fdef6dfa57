"""Reports of replicas."""

from __future__ import annotations

from typing import Any

from app.fleet.dispatch import ReplicaReport


def make_report(**fields: Any) -> ReplicaReport:
    """The report of an idle replica, with these fields changed."""
    usual: dict[str, Any] = {
        "group": "", "num_requests": 0, "num_background": 0, "num_staying_background": 0, "max_requests": 10,
        "max_running": 8, "num_waiting_tokens": 0, "num_kv_tokens": 4096, "tokens_per_s": 100.0, "ended_per_s": 4.0,
        "step_age_s": 0.0,
    }  # fmt: skip
    return ReplicaReport(**{**usual, **fields})
