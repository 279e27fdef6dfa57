"""What a replica may say of itself."""

from __future__ import annotations

from app.fleet import Report


def make_report(
    *,
    group: str = "",
    num_requests: int = 0,
    num_background: int = 0,
    num_staying_background: int = 0,
    max_requests: int = 10,
) -> Report:
    return Report(
        group=group,
        num_requests=num_requests,
        num_background=num_background,
        num_staying_background=num_staying_background,
        max_requests=max_requests,
        max_running=8,
        num_waiting_tokens=0,
        num_kv_tokens=4096,
        speed=100.0,
        ended_per_s=4.0,
        step_age_s=0.0,
    )
