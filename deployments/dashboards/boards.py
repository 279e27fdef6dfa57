"""The Grafana boards: what each panel asks Prometheus. Names of metrics are those of `app/metrics`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deployments.dashboards.rules import ITL_GOOD_LE, ITL_GOOD_S, TTFT_GOOD_LE, TTFT_GOOD_S

Json = dict[str, Any]
_MODEL = 'model_name=~"$model"'
_COLUMNS = 24  # of Grafana's grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel: a tile with a number, or lines over time."""

    title: str
    queries: Sequence[tuple[str, str]]  # (PromQL, the legend of its series)
    unit: str = "short"  # Grafana's name
    is_tile: bool = False
    red_below: float | None = None  # of a tile
    width: int = 8

    def as_json(self, number: int, x: int, y: int) -> Json:
        """As Grafana reads it, at a place of the grid."""
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
    """One dashboard: rows of panels."""

    name: str  # of its file
    title: str
    panels: Sequence[Panel]

    def as_json(self) -> Json:
        """What Grafana imports."""
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
    """The sum of a counter's rates."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{_MODEL}{more}}}[$__rate_interval]))"


def _ratio(above: str, below: str) -> str:
    """A quotient that is 0 while nothing happens."""
    return f"{above} / ({below} > 0) or 0 * {below}"


def _quantiles(metric: str, by: str, legend: str) -> list[tuple[str, str]]:
    """The median and the 99th percentile of a histogram."""
    spread = _rate(f"{metric}_bucket", f"le, {by}")
    return [(f"histogram_quantile({q}, {spread})", f"p{round(100 * q)} {legend}") for q in (0.5, 0.99)]


def _good(metric: str, le: str) -> str:
    """The share of values that do not exceed a bound of the histogram; all while there are none."""
    of_bound = _rate(f"{metric}_bucket", more=f', le=~"{le}"')
    return f"{of_bound} / ({_rate(f'{metric}_count')} > 0) or vector(1)"


def _now(metric: str, by: str = "model_name, replica") -> str:
    return f"sum by ({by}) ({metric}{{{_MODEL}}})"


_KIND = "{{model_name}} {{group}} {{class}}"
_REPLICA = "{{model_name}} {{replica}}"
_FAILED = _rate("carousel_calls_failed_total")
_ENDED = _rate("carousel_requests_finished_total")

_OVERVIEW = Board(
    name="overview",
    title="Carousel: overview",
    panels=[
        Panel(
            title=f"First token within {TTFT_GOOD_S:g} s",
            queries=[(_good("carousel_first_token_seconds", TTFT_GOOD_LE), "")],
            unit="percentunit",
            is_tile=True,
            red_below=0.99,
            width=4,
        ),
        Panel(
            title=f"Next token within {1000 * ITL_GOOD_S:g} ms",
            queries=[(_good("carousel_inter_token_seconds", ITL_GOOD_LE), "")],
            unit="percentunit",
            is_tile=True,
            red_below=0.99,
            width=4,
        ),
        Panel(
            title="Requests without failure",
            queries=[(f"1 - (({_FAILED} or vector(0)) / ({_ENDED} > 0) or vector(0))", "")],
            unit="percentunit",
            is_tile=True,
            red_below=0.999,
            width=4,
        ),
        Panel(
            title="In flight",
            queries=[(f"sum(carousel_requests_in_flight{{{_MODEL}}})", "")],
            is_tile=True,
            width=4,
        ),
        Panel(title="Tokens a second", queries=[(_rate("vllm:generation_tokens_total"), "")], is_tile=True, width=4),
        Panel(
            title="Replicas", queries=[(f"count(carousel_slots{{{_MODEL}}}) or vector(0)", "")], is_tile=True, width=4
        ),
        Panel(
            title="Time to first token",
            queries=_quantiles("carousel_first_token_seconds", "model_name, group, class", _KIND),
            unit="s",
        ),
        Panel(
            title="Between tokens",
            queries=_quantiles("carousel_inter_token_seconds", "model_name, group, class", _KIND),
            unit="s",
        ),
        Panel(
            title="In the queue",
            queries=_quantiles("carousel_request_queue_seconds", "model_name, group, class", _KIND),
            unit="s",
        ),
        Panel(
            title="Whole request",
            queries=_quantiles("carousel_request_seconds", "model_name, group, class", _KIND),
            unit="s",
        ),
        Panel(
            title="Requests that ended, a second",
            queries=[(_rate("carousel_requests_finished_total", "model_name, reason"), "{{model_name}} {{reason}}")],
        ),
        Panel(
            title="Calls refused, a second",
            queries=[
                ("sum by (reason) (rate(carousel_calls_refused_total[$__rate_interval])) or vector(0)", "{{reason}}")
            ],
        ),
        Panel(
            title="Calls failed, a second",
            queries=[(f"{_rate('carousel_calls_failed_total', 'model_name, reason')} or vector(0)", "{{reason}}")],
        ),
        Panel(
            title="Tokens a second",
            queries=[
                (_rate("vllm:prompt_tokens_total", "model_name"), "prompt {{model_name}}"),
                (_rate("vllm:generation_tokens_total", "model_name"), "generated {{model_name}}"),
            ],
        ),
        Panel(
            title="Settings in force",
            queries=[(_now("carousel_settings_info", "model_name, group, settings"), "{{model_name}} {{settings}}")],
        ),
    ],
)

_ENGINES = Board(
    name="engines",
    title="Carousel: engines",
    panels=[
        Panel(
            title="Requests in a step",
            queries=_quantiles("carousel_step_requests", "model_name, replica", _REPLICA),
        ),
        Panel(
            title="Share of slots used",
            queries=[(f"{_now('carousel_slots_used')} / {_now('carousel_slots')}", _REPLICA)],
            unit="percentunit",
        ),
        Panel(
            title="Time of a step",
            queries=_quantiles("carousel_step_seconds", "model_name, replica", _REPLICA),
            unit="s",
        ),
        Panel(
            title="Tokens in a step",
            queries=_quantiles("carousel_step_tokens", "model_name, replica", _REPLICA),
        ),
        Panel(
            title="Share of tokens that graphs compute for nothing",
            queries=[
                (
                    _ratio(
                        _rate("carousel_graph_padding_tokens_total", "model_name, replica"),
                        _rate("carousel_step_tokens_sum", "model_name, replica"),
                    ),
                    _REPLICA,
                )
            ],
            unit="percentunit",
        ),
        Panel(
            title="Steps a second",
            queries=[(_rate("carousel_engine_steps_total", "model_name, replica"), _REPLICA)],
        ),
        Panel(
            title="KV memory in use",
            queries=[(f"1 - {_now('carousel_kv_blocks_free')} / {_now('carousel_kv_blocks')}", _REPLICA)],
            unit="percentunit",
        ),
        Panel(
            title="Share of prompt tokens found in the prefix cache",
            queries=[
                (
                    _ratio(
                        _rate("carousel_engine_cached_tokens_total", "model_name, replica"),
                        _rate("carousel_engine_prompt_tokens_total", "model_name, replica"),
                    ),
                    _REPLICA,
                )
            ],
            unit="percentunit",
        ),
        Panel(
            title="Preemptions a second",
            queries=[(_rate("carousel_engine_preemptions_total", "model_name, replica"), _REPLICA)],
        ),
        Panel(
            title="In the queue",
            queries=_quantiles("carousel_queue_seconds", "model_name, replica", _REPLICA),
            unit="s",
        ),
        Panel(
            title="From first step to first token",
            queries=_quantiles("carousel_prefill_seconds", "model_name, replica", _REPLICA),
            unit="s",
        ),
        Panel(
            title="Ended otherwise than by their end, a second",
            queries=[
                (_rate(f"carousel_engine_{how}_total", "model_name, replica"), f"{how} {_REPLICA}")
                for how in ("aborted", "failed", "missed")
            ],
        ),
        Panel(
            title="Batch that the strategy aims at",
            queries=[(_now("carousel_batch_size"), _REPLICA)],
        ),
        Panel(
            title="Error of predicted output lengths",
            queries=[(_now("carousel_length_error_tokens"), _REPLICA)],
        ),
        Panel(
            title="Finished, a second",
            queries=[(_rate("carousel_engine_finished_total", "model_name, replica"), _REPLICA)],
        ),
    ],
)

_FLEET = Board(
    name="fleet",
    title="Carousel: fleet",
    panels=[
        Panel(title="Ingresses", queries=[("carousel_ingresses", "")], is_tile=True, width=6),
        Panel(title="Did not answer the scrape", queries=[("carousel_scrape_missing", "")], is_tile=True, width=6),
        Panel(
            title="Requests that wait",
            queries=[(f"sum(carousel_queue_requests{{{_MODEL}}}) or vector(0)", "")],
            is_tile=True,
            width=6,
        ),
        Panel(
            title="Longest expected wait",
            queries=[(f"max(carousel_queue_wait_seconds{{{_MODEL}}}) or vector(0)", "")],
            unit="s",
            is_tile=True,
            width=6,
        ),
        Panel(title="Requests that wait", queries=[(_now("carousel_queue_requests"), _REPLICA)]),
        Panel(title="Prompt tokens that wait", queries=[(_now("carousel_queue_tokens"), _REPLICA)]),
        Panel(title="Tokens still to compute", queries=[(_now("carousel_outstanding_tokens"), _REPLICA)]),
        Panel(
            title="Tokens generated a second",
            queries=[(_rate("carousel_engine_generated_tokens_total", "model_name, replica"), _REPLICA)],
        ),
        Panel(
            title="Decisions of dispatch, a second",
            queries=[(_rate("carousel_dispatches_total", "model_name, reason"), "{{model_name}} {{reason}}")],
        ),
        Panel(
            title="Went on at another replica, a second",
            queries=[(f"{_rate('carousel_resumes_total', 'model_name, reason')} or vector(0)", "{{reason}}")],
        ),
        Panel(
            title="How late event loops wake",
            queries=[
                (
                    "histogram_quantile(0.99, "
                    "sum by (le, process) (rate(carousel_loop_delay_seconds_bucket[$__rate_interval])))",
                    "p99 {{process}}",
                )
            ],
            unit="s",
        ),
        Panel(
            title="Stalls of event loops, a second",
            queries=[("sum by (process) (rate(carousel_loop_stalls_total[$__rate_interval]))", "{{process}}")],
        ),
        Panel(
            title="Tasks and waiting calls",
            queries=[
                ("sum by (process) (carousel_loop_tasks)", "tasks {{process}}"),
                ("sum by (process, threads) (carousel_thread_queue)", "waiting {{process}} {{threads}}"),
            ],
        ),
        Panel(
            title="Requests in one frame",
            queries=_quantiles("carousel_frame_deltas", "model_name", "{{model_name}}"),
        ),
    ],
)


def _plain_rate(metric: str) -> str:
    return f"rate({metric}[$__rate_interval])"


_BACKGROUND = _rate("carousel_request_seconds_count", "model_name", ', class="background"')

_BATCHES = Board(
    name="batches",
    title="Carousel: batches",
    panels=[
        Panel(
            title="Lines a second",
            queries=[
                (_plain_rate("carousel_batch_lines_completed_total"), "completed"),
                (_plain_rate("carousel_batch_lines_failed_total"), "failed"),
            ],
        ),
        Panel(
            title="Lines since the start",
            queries=[
                ("carousel_batch_lines_completed_total", "completed"),
                ("carousel_batch_lines_failed_total", "failed"),
            ],
        ),
        Panel(
            title="Background requests that ended, a second",
            queries=[(f"{_BACKGROUND} or vector(0)", "{{model_name}}")],
        ),
        Panel(
            title="Webhooks a second",
            queries=[
                (_plain_rate("carousel_webhook_attempts_total"), "sent"),
                (_plain_rate("carousel_webhooks_delivered_total"), "delivered"),
                (_plain_rate("carousel_webhooks_given_up_total"), "given up"),
            ],
        ),
        Panel(title="Webhooks to deliver", queries=[("carousel_webhooks_pending", "")]),
        Panel(title="Batches that wait for their storage", queries=[("carousel_batches_paused", "")]),
    ],
)

BOARDS = (_OVERVIEW, _ENGINES, _FLEET, _BATCHES)
