"""Defines the Grafana boards and their panels' Prometheus queries. The metrics are defined in `app/metrics`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.json_pieces import Json
from deployments.dashboards.rules import ITL_GOOD_LE, ITL_GOOD_S, TTFT_GOOD_LE, TTFT_GOOD_S

_MODEL = 'model_name=~"$model"'
_COLUMNS = 24  # the width of Grafana's grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel: a tile with the current value, or lines over time."""

    title: str
    queries: Sequence[tuple[str, str]]  # (PromQL, legend)
    unit: str = "short"  # Grafana's name of the unit
    is_tile: bool = False
    red_below: float | None = None  # a tile is red below this value
    width: int = 8

    def as_json(self, number: int, x: int, y: int) -> Json:
        """Return the panel's JSON for Grafana. `x` and `y` are its column and row in the grid."""
        height = 4 if self.is_tile else 8
        steps: list[Json] = [{"color": "green", "value": None}]
        if self.red_below is not None:
            steps = [{"color": "red", "value": None}, {"color": "green", "value": self.red_below}]
        targets = [
            {"refId": chr(ord("A") + index), "expr": expr, "legendFormat": legend, "instant": self.is_tile}
            for index, (expr, legend) in enumerate(self.queries)
        ]
        return {
            "id": number,
            "type": "stat" if self.is_tile else "timeseries",
            "title": self.title,
            "datasource": {"type": "prometheus", "uid": "${datasource}"},
            "gridPos": {"x": x, "y": y, "w": self.width, "h": height},
            "fieldConfig": {
                "defaults": {"unit": self.unit, "min": 0, "thresholds": {"mode": "absolute", "steps": steps}},
                "overrides": [],
            },
            "targets": targets,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A dashboard. Its panels fill rows from left to right."""

    name: str  # the file name without .json
    title: str
    panels: Sequence[Panel]

    def as_json(self) -> Json:
        """Return the JSON that Grafana imports."""
        panels, x, y, height = [], 0, 0, 0
        for number, panel in enumerate(self.panels, start=1):
            if x + panel.width > _COLUMNS:
                x, y = 0, y + height
            panels.append(panel.as_json(number, x, y))
            x, height = x + panel.width, panels[-1]["gridPos"]["h"]
        return {
            "uid": f"carousel-{self.name}",
            "title": self.title,
            "tags": ["carousel"],
            "schemaVersion": 39,
            "version": 1,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "templating": {"list": _VARIABLES},
            "panels": panels,
        }


_VARIABLES: list[Json] = [
    {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"},
    {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "query": "label_values(carousel_requests_in_flight, model_name)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    },
]


def _rate(metric: str, by: str = "", more: str = "") -> str:
    """Return PromQL for a counter's summed rate. `by` lists labels to keep, and `more` has further label matchers."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{_MODEL}{more}}}[$__rate_interval]))"


def _ratio(above: str, below: str) -> str:
    """Return PromQL for a quotient. It is 0, not missing, while the divisor is 0."""
    return f"{above} / ({below} > 0) or 0 * {below}"


def _quantiles(metric: str, by: str, legend: str) -> list[tuple[str, str]]:
    """Return queries for the median and the 99th percentile of a histogram."""
    spread = _rate(f"{metric}_bucket", f"le, {by}")
    return [(f"histogram_quantile({q}, {spread})", f"p{round(100 * q)} {legend}") for q in (0.5, 0.99)]


def _good(metric: str, le: str) -> str:
    """Return PromQL for the share of a histogram's values up to a bound. It is 1 while there are no values."""
    of_bound = _rate(f"{metric}_bucket", more=f', le=~"{le}"')
    return f"{of_bound} / ({_rate(f'{metric}_count')} > 0) or vector(1)"


def _now(metric: str, by: str = "model_name, replica") -> str:
    return f"sum by ({by}) ({metric}{{{_MODEL}}})"


_REPLICA = "{{model_name}} {{replica}}"


def _tile(title: str, expr: str, *, unit: str = "short", red_below: float | None = None, width: int = 4) -> Panel:
    return Panel(title=title, queries=[(expr, "")], unit=unit, is_tile=True, red_below=red_below, width=width)


def _lines(title: str, *queries: tuple[str, str], unit: str = "short") -> Panel:
    return Panel(title=title, queries=queries, unit=unit)


def _by_kind(title: str, metric: str) -> Panel:
    return _lines(
        title, *_quantiles(metric, "model_name, group, class", "{{model_name}} {{group}} {{class}}"), unit="s"
    )


def _by_replica(title: str, metric: str, *, unit: str = "short") -> Panel:
    return _lines(title, *_quantiles(metric, "model_name, replica", _REPLICA), unit=unit)


def _replica_rate(metric: str) -> str:
    return _rate(metric, "model_name, replica")


def _plain_rate(metric: str) -> str:
    return f"rate({metric}[$__rate_interval])"


_OVERVIEW = Board(
    name="overview",
    title="Carousel: overview",
    panels=[
        _tile(f"First token within {TTFT_GOOD_S:g} s", _good("carousel_first_token_seconds", TTFT_GOOD_LE),
              unit="percentunit", red_below=0.99),
        _tile(f"Next token within {1000 * ITL_GOOD_S:g} ms", _good("carousel_inter_token_seconds", ITL_GOOD_LE),
              unit="percentunit", red_below=0.99),
        _tile("Successful requests",
              f"1 - (({_rate('carousel_calls_failed_total')} or vector(0)) / "
              f"({_rate('carousel_requests_finished_total')} > 0) or vector(0))",
              unit="percentunit", red_below=0.999),
        _tile("In flight", f"sum(carousel_requests_in_flight{{{_MODEL}}})"),
        _tile("Tokens per second", _rate("vllm:generation_tokens_total")),
        _tile("Replicas", f"count(carousel_slots{{{_MODEL}}}) or vector(0)"),
        _by_kind("Time to first token", "carousel_first_token_seconds"),
        _by_kind("Time between tokens", "carousel_inter_token_seconds"),
        _by_kind("Time in the queue", "carousel_request_queue_seconds"),
        _by_kind("Request duration", "carousel_request_seconds"),
        _lines("Finished requests per second",
               (_rate("carousel_requests_finished_total", "model_name, reason"), "{{model_name}} {{reason}}")),
        _lines("Refused calls per second",
               ("sum by (reason) (rate(carousel_calls_refused_total[$__rate_interval])) or vector(0)", "{{reason}}")),
        _lines("Failed calls per second",
               (f"{_rate('carousel_calls_failed_total', 'model_name, reason')} or vector(0)", "{{reason}}")),
        _lines("Tokens per second",
               (_rate("vllm:prompt_tokens_total", "model_name"), "prompt {{model_name}}"),
               (_rate("vllm:generation_tokens_total", "model_name"), "generated {{model_name}}")),
        _lines("Active settings",
               (_now("carousel_settings_info", "model_name, group, settings"), "{{model_name}} {{settings}}")),
    ],
)  # fmt: skip

_ENGINES = Board(
    name="engines",
    title="Carousel: engines",
    panels=[
        _by_replica("Requests per step", "carousel_step_requests"),
        _lines("Share of slots in use",
               (f"{_now('carousel_slots_used')} / {_now('carousel_slots')}", _REPLICA), unit="percentunit"),
        _by_replica("Step duration", "carousel_step_seconds", unit="s"),
        _by_replica("Tokens per step", "carousel_step_tokens"),
        _lines("Share of padding tokens in CUDA graphs",
               (_ratio(_replica_rate("carousel_graph_padding_tokens_total"),
                       _replica_rate("carousel_step_tokens_sum")), _REPLICA), unit="percentunit"),
        _lines("Steps per second",
               (_replica_rate("carousel_engine_steps_total"), _REPLICA),
               (_replica_rate("carousel_steps_without_graph_total"), f"{_REPLICA}, on a GPU without a graph")),
        _lines("KV memory in use",
               (f"1 - {_now('carousel_kv_blocks_free')} / {_now('carousel_kv_blocks')}", _REPLICA), unit="percentunit"),
        _lines("Share of prompt tokens found in the prefix cache",
               (_ratio(_replica_rate("carousel_engine_cached_tokens_total"),
                       _replica_rate("carousel_engine_prompt_tokens_total")), _REPLICA), unit="percentunit"),
        _lines("Preemptions per second", (_replica_rate("carousel_engine_preemptions_total"), _REPLICA)),
        _by_replica("Time in the queue", "carousel_queue_seconds", unit="s"),
        _by_replica("Time from first step to first token", "carousel_prefill_seconds", unit="s"),
        _lines("Aborted, failed or late requests per second",
               *((_replica_rate(f"carousel_engine_{how}_total"), f"{how} {_REPLICA}")
                 for how in ("aborted", "failed", "missed"))),
        _lines("Batch size targeted by the strategy", (_now("carousel_batch_size"), _REPLICA)),
        _lines("Error in predicted output lengths", (_now("carousel_length_error_tokens"), _REPLICA)),
        _lines("Finished requests per second", (_replica_rate("carousel_engine_finished_total"), _REPLICA)),
    ],
)  # fmt: skip

_FLEET = Board(
    name="fleet",
    title="Carousel: fleet",
    panels=[
        _tile("Ingresses", "carousel_ingresses", width=6),
        _tile("Missing from the scrape", "carousel_scrape_missing", width=6),
        _tile("Waiting requests", f"sum(carousel_queue_requests{{{_MODEL}}}) or vector(0)", width=6),
        _tile("Longest expected wait", f"max(carousel_queue_wait_seconds{{{_MODEL}}}) or vector(0)", unit="s", width=6),
        _lines("Waiting requests", (_now("carousel_queue_requests"), _REPLICA)),
        _lines("Waiting prompt tokens", (_now("carousel_queue_tokens"), _REPLICA)),
        _lines("Outstanding tokens", (_now("carousel_outstanding_tokens"), _REPLICA)),
        _lines("Generated tokens per second", (_replica_rate("carousel_engine_generated_tokens_total"), _REPLICA)),
        _lines("Dispatch decisions per second",
               (_rate("carousel_dispatches_total", "model_name, reason"), "{{model_name}} {{reason}}")),
        _lines("Requests resumed on another replica per second",
               (f"{_rate('carousel_resumes_total', 'model_name, reason')} or vector(0)", "{{reason}}")),
        _lines("Event loop delay",
               ("histogram_quantile(0.99, "
                "sum by (le, process) (rate(carousel_loop_delay_seconds_bucket[$__rate_interval])))",
                "p99 {{process}}"), unit="s"),
        _lines("Event loop stalls per second",
               ("sum by (process) (rate(carousel_loop_stalls_total[$__rate_interval]))", "{{process}}")),
        _lines("Tasks and waiting calls",
               ("sum by (process) (carousel_loop_tasks)", "tasks {{process}}"),
               ("sum by (process, threads) (carousel_thread_queue)", "waiting {{process}} {{threads}}")),
        _lines("Requests per frame", *_quantiles("carousel_frame_deltas", "model_name", "{{model_name}}")),
    ],
)  # fmt: skip

_BATCHES = Board(
    name="batches",
    title="Carousel: batches",
    panels=[
        _lines("Lines per second",
               (_plain_rate("carousel_batch_lines_completed_total"), "completed"),
               (_plain_rate("carousel_batch_lines_failed_total"), "failed")),
        _lines("Lines since startup",
               ("carousel_batch_lines_completed_total", "completed"), ("carousel_batch_lines_failed_total", "failed")),
        _lines("Finished background requests per second",
               (_rate("carousel_request_seconds_count", "model_name", ', class="background"') + " or vector(0)",
                "{{model_name}}")),
        _lines("Webhooks per second",
               (_plain_rate("carousel_webhook_attempts_total"), "sent"),
               (_plain_rate("carousel_webhooks_delivered_total"), "delivered"),
               (_plain_rate("carousel_webhooks_given_up_total"), "given up")),
        _lines("Pending webhooks", ("carousel_webhooks_pending", "")),
        _lines("Batches waiting for storage", ("carousel_batches_paused", "")),
    ],
)  # fmt: skip

BOARDS = (_OVERVIEW, _ENGINES, _FLEET, _BATCHES)
