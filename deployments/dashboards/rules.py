"""Defines recording rules and alerts for Prometheus. docs/operate/monitoring.md explains how to react to an alert."""

from __future__ import annotations

from dataclasses import dataclass

from app.json_pieces import Json

# The objectives for alerts and tiles, in seconds and as regular expressions for `le`. They must be histogram bounds.
# Prometheus 3 writes the bound 1 as 1.0. Dots are in brackets, because the expression `1.0` would also match 120.
TTFT_GOOD_S, TTFT_GOOD_LE = 1.0, "1|1[.]0"
ITL_GOOD_S, ITL_GOOD_LE = 0.1, "0[.]1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    name: str
    expr: str
    lasts: str = "5m"  # how long the condition must be true before the alert fires
    severity: str = "warning"
    summary: str

    def as_json(self) -> Json:
        """Return the alert in the format of Prometheus's rule files."""
        runbook = "docs/operate/monitoring.md"
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.lasts,
            "labels": {"severity": self.severity},
            "annotations": {"summary": self.summary, "runbook": f"{runbook}, {self.name}"},
        }


def _good_ratio(metric: str, le: str) -> str:
    return (
        f'sum by (model_name, class) (rate({metric}_bucket{{le=~"{le}"}}[5m]))'
        f" / (sum by (model_name, class) (rate({metric}_count[5m])) > 0)"
    )


_RECORDED = {
    "carousel:first_token_good:ratio_rate5m": _good_ratio("carousel_first_token_seconds", TTFT_GOOD_LE),
    "carousel:inter_token_good:ratio_rate5m": _good_ratio("carousel_inter_token_seconds", ITL_GOOD_LE),
    "carousel:calls:rate5m": (
        "sum by (model_name) (rate(carousel_requests_finished_total[5m]))"
        ' + (sum by (model_name) (rate(carousel_calls_refused_total{reason!="no_idle_slot"}[5m]))'
        " or 0 * sum by (model_name) (rate(carousel_requests_finished_total[5m])))"
    ),
    "carousel:slots_used:ratio": "sum by (model_name) (carousel_slots_used) / sum by (model_name) (carousel_slots)",
    "carousel:kv_used:ratio": (
        "1 - sum by (model_name) (carousel_kv_blocks_free) / sum by (model_name) (carousel_kv_blocks)"
    ),
}

ALERTS = (
    Alert(
        name="CarouselAbsent",
        expr="absent(carousel_ingresses)",
        lasts="2m",
        severity="critical",
        summary="No ingress responds to scrapes.",
    ),
    Alert(
        name="CarouselProcessMissing",
        expr="carousel_scrape_missing > 0",
        lasts="2m",
        summary="{{ $value }} processes do not respond to scrapes in time.",
    ),
    Alert(
        name="CarouselNoReplica",
        expr='sum by (model_name) (rate(carousel_calls_refused_total{reason="unavailable"}[5m])) > 0',
        lasts="1m",
        severity="critical",
        summary="Calls to {{ $labels.model_name }} are refused because no replica is available.",
    ),
    Alert(
        name="CarouselBackendFailed",
        expr="max by (model_name, replica) (carousel_backends_failed) > 0",
        lasts="5m",
        summary="Replica {{ $labels.replica }} of {{ $labels.model_name }} uses a slower backend than necessary.",
    ),
    Alert(
        name="CarouselWantsReplicas",
        expr=(  # a model without replicas has no `carousel_slots`
            "max by (model_name) (carousel_replicas_wanted)"
            " > (count by (model_name) (carousel_slots) or 0 * max by (model_name) (carousel_replicas_wanted))"
        ),
        lasts="10m",
        summary="{{ $labels.model_name }} needs {{ $value }} replicas but has fewer.",
    ),
    Alert(
        name="CarouselOverloaded",
        expr=(
            'sum by (model_name) (rate(carousel_calls_refused_total{reason="overloaded"}[5m]))'
            " / (carousel:calls:rate5m > 0) > 0.05"
        ),
        summary=(
            "{{ $value | humanizePercentage }} of calls to {{ $labels.model_name }} are refused because of full queues."
        ),
    ),
    Alert(
        name="CarouselCallsFail",
        expr=(
            "sum by (model_name) (rate(carousel_calls_failed_total[5m]))"
            " / (sum by (model_name) (rate(carousel_requests_finished_total[5m])) > 0) > 0.01"
        ),
        severity="critical",
        summary="{{ $value | humanizePercentage }} of calls to {{ $labels.model_name }} fail after they have started.",
    ),
    Alert(
        name="CarouselReplicasLost",
        # Resumes for these reasons are not failures, because the request was moved on purpose.
        expr='sum by (model_name) (increase(carousel_resumes_total{reason!~"decode|ending|memory"}[15m])) > 0',
        lasts="0m",
        summary="Requests for {{ $labels.model_name }} resumed on another replica because their replica was lost.",
    ),
    Alert(
        name="CarouselFirstTokenSlow",
        expr='carousel:first_token_good:ratio_rate5m{class="foreground"} < 0.99',
        summary="Only {{ $value | humanizePercentage }} of first tokens from {{ $labels.model_name }} meet the SLO.",
    ),
    Alert(
        name="CarouselTokensSlow",
        expr='carousel:inter_token_good:ratio_rate5m{class="foreground"} < 0.99',
        summary="Only {{ $value | humanizePercentage }} of tokens from {{ $labels.model_name }} meet the SLO.",
    ),
    Alert(
        name="CarouselQueueLong",
        expr="carousel_queue_wait_seconds > 10",
        summary="A new request at {{ $labels.replica }} would wait for {{ $value | humanizeDuration }}.",
    ),
    Alert(
        name="CarouselMemoryShort",
        expr="sum by (model_name, replica) (rate(carousel_engine_memory_preemptions_total[5m])) > 0.5",
        summary="{{ $labels.replica }} preempts {{ $value | humanize }} requests per second to free memory.",
    ),
    Alert(
        name="CarouselEngineStuck",
        expr="carousel_slots_used > 0 and rate(carousel_engine_steps_total[5m]) == 0",
        lasts="2m",
        severity="critical",
        summary="{{ $labels.replica }} has requests but runs no steps.",
    ),
    Alert(
        name="CarouselStepsFail",
        expr="sum by (model_name, replica) (increase(carousel_engine_failed_total[15m])) > 0",
        lasts="0m",
        summary="Steps on {{ $labels.replica }} failed, along with all requests in them.",
    ),
    Alert(
        name="CarouselLoopStalls",
        expr="sum by (process, id) (rate(carousel_loop_stalled_seconds_total[5m])) > 0.05",
        summary=(
            "The event loop of {{ $labels.process }} {{ $labels.id }} is blocked for"
            " {{ $value | humanizePercentage }} of the time."
        ),
    ),
    Alert(
        name="CarouselBatchLinesFail",
        expr=(
            "rate(carousel_batch_lines_failed_total[15m])"
            " > 0.1 * (rate(carousel_batch_lines_completed_total[15m]) + rate(carousel_batch_lines_failed_total[15m]))"
        ),
        summary="More than a tenth of batch lines end with an error.",
    ),
    Alert(
        name="CarouselBatchesPaused",
        expr="carousel_batches_paused > 0",
        summary="{{ $value }} batches are paused because their storage is full or failing.",
    ),
    Alert(
        name="CarouselWebhooksGivenUp",
        expr="increase(carousel_webhooks_given_up_total[1h]) > 0",
        lasts="0m",
        summary="{{ $value | humanize }} webhook messages could not be delivered.",
    ),
)


def rules() -> Json:
    """Return the contents of a file for Prometheus's `rule_files`."""
    recorded = [{"record": name, "expr": expr} for name, expr in _RECORDED.items()]
    return {
        "groups": [
            {"name": "carousel-ratios", "rules": recorded},
            {"name": "carousel-alerts", "rules": [alert.as_json() for alert in ALERTS]},
        ]
    }
