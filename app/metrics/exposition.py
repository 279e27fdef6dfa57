"""What ingresses and replicas have measured, as Prometheus text.

Two sets of names: vLLM's (`vllm_names.py`), with one value for each model; and our own, `carousel_*`, with one value
for each replica of what replicas measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.engine.histogram import Distribution
from app.engine.stats import EngineMeasurements, EngineStats, SleepState, SleepStats
from app.engine.tuner import Tuning
from app.metrics.event_loop import LoopSnapshot
from app.metrics.families import by_reason, counter, gauge, histogram
from app.metrics.reports import BatchCounts, EngineReport
from app.metrics.requests import Latencies, ModelSnapshot, Snapshot, merge, without_requests
from app.metrics.vllm_names import ModelReport, vllm_families

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """What `/metrics` reports at one moment."""

    requests: Sequence[Snapshot]  # one for each ingress that answered
    replicas: Mapping[str, Sequence[EngineReport]]  # by the model's name; those that answered
    # Processes that have stopped, or did not answer: their counts remain.
    gone: Mapping[str, Sequence[EngineReport]] = field(default_factory=dict)
    gone_requests: Sequence[Snapshot] = ()
    loops: Mapping[tuple[str, str], LoopSnapshot] = field(default_factory=dict)  # by a process's kind and its id
    batches: Sequence[BatchCounts] = ()  # of the one process that runs them, if it answered
    num_missing: int = 0  # ingresses and replicas that did not answer in time


def exposition(scrape: Scrape) -> bytes:
    """The text of `/metrics`."""
    models = _models(scrape)
    families = [
        *_request_families(models),
        *_replica_families(scrape),
        *_loop_families(scrape),
        *_batch_families(scrape.batches),
        *vllm_families(models),
    ]
    return generate_latest(_Families(families))


class _Families(Collector):
    """Families that are made already, as the collector that prometheus_client asks for."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _models(scrape: Scrape) -> list[ModelReport]:
    return [
        ModelReport(name, requests, scrape.replicas.get(name, ()), scrape.gone.get(name, ()))
        for name, requests in merge([*scrape.requests, *map(without_requests, scrape.gone_requests)]).items()
    ]


def _request_families(models: Sequence[ModelReport]) -> Iterable[Metric]:
    """What the ingresses measure, by model. Some of it has no vLLM name; the rest is there under vLLM's alone."""
    yield gauge(
        "carousel_requests_in_flight",
        "Requests that the ingresses are answering.",
        ("model_name",),
        [((model.name,), model.requests.num_in_flight) for model in models],
    )
    for name, text, values in _REASONS:
        yield by_reason(f"carousel_{name}", text, "reason", [(each.name, values(each.requests)) for each in models])
    for name, text, time in _LATENCIES:
        kinds = [
            ((each.name, *kind), time(spread)) for each in models for kind, spread in each.requests.latencies.items()
        ]
        yield histogram(f"carousel_{name}", text, ("model_name", "group", "class"), [row for row in kinds if row[0][0]])
    for name, text, value in _TIMES_AND_SIZES:
        rows = [((each.name,), value(each.requests)) for each in models if each.name]
        yield histogram(f"carousel_{name}", text, ("model_name",), rows)


_REASONS: Sequence[tuple[str, str, Callable[[ModelSnapshot], Mapping[str, float]]]] = (
    ("requests_finished", "Requests that ended, by finish reason.", lambda model: model.finished),
    ("calls_refused", "Calls that ended with an error before their first token.", lambda model: model.refused),
    ("calls_failed", "Calls that ended with an error after their first token.", lambda model: model.failed),
    ("dispatches", "Decisions where to send a request, by what decided.", lambda model: model.dispatched),
    ("resumes", "Requests that went on at another replica, by what had happened.", lambda model: model.resumed),
)
_LATENCIES: Sequence[tuple[str, str, Callable[[Latencies], Distribution]]] = (
    ("first_token_seconds", "From a call's arrival to a request's first token.", lambda times: times.first_token_s),
    ("inter_token_seconds", "Between two tokens of a request.", lambda times: times.inter_token_s),
    ("request_seconds", "From a call's arrival to a request's end.", lambda times: times.request_s),
    (
        "request_queue_seconds",
        "From a request's arrival at its replica to its first step.",
        lambda times: times.queue_s,
    ),
)
_TIMES_AND_SIZES: Sequence[tuple[str, str, Callable[[ModelSnapshot], Distribution]]] = (
    ("prompt_tokens", "Prompt tokens of a request.", lambda model: model.prompt_tokens),
    ("generated_tokens", "Tokens generated for a request.", lambda model: model.generated_tokens),
    ("frame_deltas", "Requests with tokens in one frame from a replica.", lambda model: model.deltas_per_frame),
)

_LABELS = ("model_name", "replica", "group")
_LOOP_LABELS = ("process", "id")


def _replica_families(scrape: Scrape) -> Iterable[Metric]:
    """What each engine counts and measures."""
    reports = [
        ((name, each.replica_id, each.group), each) for name, several in scrape.replicas.items() for each in several
    ]
    yield gauge(
        "carousel_scrape_missing",
        "Processes that did not answer this scrape in time.",
        (),
        [((), scrape.num_missing)],
    )
    num_ingresses = sum(process == "ingress" for process, _ in scrape.loops)
    yield gauge("carousel_ingresses", "Ingresses that answered this scrape.", (), [((), num_ingresses)])
    for name, text, value in _ENGINE_GAUGES:
        yield gauge(f"carousel_{name}", text, _LABELS, [(labels, value(each)) for labels, each in reports])
    yield gauge(
        "carousel_settings_info",
        "The version of the settings of scheduling: their names and a hash.",
        (*_LABELS, "settings"),
        [((*labels, each.stats.settings), 1) for labels, each in reports],
    )
    yield from _tuning_families([(labels, each.measurements.tuning) for labels, each in reports])
    for name, text, count in _ENGINE_COUNTERS:
        yield counter(f"carousel_{name}", text, _LABELS, [(labels, count(each.stats)) for labels, each in reports])
    yield counter(
        "carousel_graph_padding_tokens",
        "Tokens that steps computed for nothing, as graphs have a few sizes.",
        _LABELS,
        [(labels, each.measurements.num_padding_tokens) for labels, each in reports],
    )
    adapters = [(labels, each.measurements.adapters) for labels, each in reports]
    yield gauge(
        "carousel_adapters_loaded",
        "LoRA adapters in memory.",
        _LABELS,
        [(labels, len(each.loaded)) for labels, each in adapters if each is not None],
    )
    yield counter(
        "carousel_adapter_loads",
        "LoRA adapters read, the same ones again after they had made room for others too.",
        _LABELS,
        [(labels, each.num_loads) for labels, each in adapters if each is not None],
    )
    yield from _sleep_families([(labels, each.measurements.sleep) for labels, each in reports])
    for name, text, spread in _ENGINE_HISTOGRAMS:
        rows = [(labels, spread(each.measurements)) for labels, each in reports]
        yield histogram(f"carousel_{name}", text, _LABELS, rows)


def _sleep_families(rows: Iterable[tuple[tuple[str, ...], SleepStats | None]]) -> Iterable[Metric]:
    """Of the replicas that sleep."""
    dozing = [(labels, sleep) for labels, sleep in rows if sleep is not None]
    yield gauge(
        "carousel_sleep_state",
        "1 for the state that a replica with sleep_after_s is in.",
        (*_LABELS, "state"),
        [((*labels, state), sleep.state == state) for labels, sleep in dozing for state in SleepState],
    )
    for name, text, value in _SLEEP_COUNTERS:
        yield counter(f"carousel_{name}", text, _LABELS, [(labels, value(sleep)) for labels, sleep in dozing])


_SLEEP_COUNTERS: Sequence[tuple[str, str, Callable[[SleepStats], float]]] = (
    ("wakes", "Times that a replica has taken its memory again.", lambda sleep: sleep.num_wakes),
    ("waking_seconds", "Seconds that these took.", lambda sleep: sleep.waking_s),
    ("device_queue_seconds", "Seconds that requests waited for the memory of other models.", lambda s: s.queued_s),
    ("turns_ended", "Times that a replica slept with requests, as others waited.", lambda s: s.num_turns_ended),
)


def _tuning_families(rows: Iterable[tuple[tuple[str, ...], Tuning | None]]) -> Iterable[Metric]:
    """Of the replicas that have targets."""
    tuned = [(labels, tuning) for labels, tuning in rows if tuning is not None]
    yield gauge(
        "carousel_limit",
        "Limits in force, which the tuner moves to hold the targets.",
        (*_LABELS, "limit"),
        [((*labels, name), value) for labels, tuning in tuned for name, value in tuning.limits._asdict().items()],
    )
    yield gauge(
        "carousel_limits_info",
        "What holds the limits where they are.",
        (*_LABELS, "reason"),
        [((*labels, str(tuning.reason)), 1) for labels, tuning in tuned],
    )
    yield gauge(
        "carousel_target_p99_seconds",
        "99th percentiles that the targets are for, in the last half minute.",
        (*_LABELS, "target"),
        [
            ((*labels, name), seconds)
            for labels, tuning in tuned
            for name, seconds in (("ttft_p99", tuning.ttft_p99_s), ("itl_p99", tuning.itl_p99_s))
        ],
    )
    yield gauge(
        "carousel_targets_missed",
        "1 while a target is missed that other limits would not help.",
        _LABELS,
        [(labels, tuning.is_missed) for labels, tuning in tuned],
    )
    yield counter(
        "carousel_limit_changes",
        "Changes of limits since the settings were last set.",
        _LABELS,
        [(labels, tuning.num_changes) for labels, tuning in tuned],
    )


_ENGINE_GAUGES: Sequence[tuple[str, str, Callable[[EngineReport], float]]] = (
    ("slots", "Requests that one step can have.", lambda each: each.measurements.max_running),
    ("slots_used", "Requests that take part in steps.", lambda each: each.stats.num_running),
    ("queue_requests", "Requests that wait.", lambda each: each.stats.num_waiting),
    ("queue_tokens", "Tokens of their prompts.", lambda each: each.stats.num_waiting_tokens),
    ("queue_wait_seconds", "How long a request that arrived now would wait.", lambda each: each.stats.estimated_wait_s),
    (
        "outstanding_tokens",
        "Tokens still to compute for all requests, outputs as far as predicted.",
        lambda each: each.measurements.num_outstanding_tokens,
    ),
    ("batch_size", "Requests that the strategy aims at; 0 without batches.", lambda each: each.stats.batch_size),
    ("kv_blocks", "Blocks of KV memory.", lambda each: each.stats.num_blocks),
    (
        "kv_blocks_free",
        "Blocks that could be allocated, cached ones included.",
        lambda each: each.stats.num_free_blocks,
    ),
    (
        "length_error_tokens",
        "Mean error of predicted output lengths, recently.",
        lambda each: each.stats.mean_length_error_tokens,
    ),
)
_ENGINE_COUNTERS: Sequence[tuple[str, str, Callable[[EngineStats], float]]] = (
    ("engine_steps", "Steps.", lambda stats: stats.total_steps),
    ("engine_prompt_tokens", "Prompt tokens of admitted requests.", lambda stats: stats.total_prompt_tokens),
    ("engine_cached_tokens", "Of these, found in the prefix cache.", lambda stats: stats.total_cached_tokens),
    ("engine_generated_tokens", "Tokens generated.", lambda stats: stats.total_generated_tokens),
    ("engine_preemptions", "Times that a request's memory was taken back.", lambda stats: stats.total_preemptions),
    (
        "engine_memory_preemptions",
        "Of these, because memory was short for requests that ran.",
        lambda stats: stats.total_memory_preemptions,
    ),
    ("engine_drafted_tokens", "Tokens computed as drafts of the next ones.", lambda stats: stats.total_drafted_tokens),
    ("engine_accepted_tokens", "Drafts that requests went on with.", lambda stats: stats.total_accepted_tokens),
    ("engine_finished", "Requests ended by stop or length.", lambda stats: stats.total_finished),
    ("engine_aborted", "Requests ended by their callers.", lambda stats: stats.total_aborted),
    ("engine_failed", "Requests ended by a failed step.", lambda stats: stats.total_failed),
    ("engine_missed", "Requests ended by their deadline.", lambda stats: stats.total_missed),
)
_ENGINE_HISTOGRAMS: Sequence[tuple[str, str, Callable[[EngineMeasurements], Distribution]]] = (
    ("step_seconds", "Time of one step.", lambda measured: measured.step_s),
    ("step_tokens", "Tokens computed in one step.", lambda measured: measured.step_tokens),
    ("queue_seconds", "From a request's arrival to its first step.", lambda measured: measured.queue_s),
    ("step_requests", "Requests in one step.", lambda measured: measured.step_requests),
    ("prefill_seconds", "From a request's first step to its first token.", lambda measured: measured.prefill_s),
)


def _loop_families(scrape: Scrape) -> Iterable[Metric]:
    """The event loop of each process that serves requests."""
    rows = list(scrape.loops.items())
    rows += [
        (("replica", each.replica_id), each.loop)
        for several in scrape.replicas.values()
        for each in several
        if each.loop is not None
    ]
    yield histogram(
        "carousel_loop_delay_seconds",
        "How late an event loop woke.",
        _LOOP_LABELS,
        [(labels, loop.delay_s) for labels, loop in rows],
    )
    yield counter(
        "carousel_loop_stalls",
        "Times that an event loop woke more than 50 ms late.",
        _LOOP_LABELS,
        [(labels, loop.num_stalls) for labels, loop in rows],
    )
    yield counter(
        "carousel_loop_stalled_seconds",
        "How late it was these times, together.",
        _LOOP_LABELS,
        [(labels, loop.stalled_s) for labels, loop in rows],
    )
    yield gauge(
        "carousel_loop_tasks",
        "Tasks of an event loop that have not ended.",
        _LOOP_LABELS,
        [(labels, loop.num_tasks) for labels, loop in rows],
    )
    yield gauge(
        "carousel_thread_queue",
        "Calls that wait for a thread beside an event loop.",
        (*_LOOP_LABELS, "threads"),
        [((*labels, name), number) for labels, loop in rows for name, number in loop.queued.items()],
    )


def _batch_families(batches: Sequence[BatchCounts]) -> Iterable[Metric]:
    """None where there are no batches."""
    for name, text, count in _BATCH_COUNTERS if batches else ():
        yield counter(f"carousel_{name}", text, (), [((), sum(map(count, batches)))])
    for name, text, count in _BATCH_GAUGES if batches else ():
        yield gauge(f"carousel_{name}", text, (), [((), sum(map(count, batches)))])


_BATCH_COUNTERS: Sequence[tuple[str, str, Callable[[BatchCounts], int]]] = (
    ("batch_lines_completed", "Lines of batches that were answered.", lambda each: each.num_lines_completed),
    ("batch_lines_failed", "Lines of batches that ended with an error.", lambda each: each.num_lines_failed),
    ("webhook_attempts", "Messages sent to receivers, again too.", lambda each: each.num_webhook_attempts),
    ("webhooks_delivered", "Messages that have arrived.", lambda each: each.num_webhooks_delivered),
    ("webhooks_given_up", "Messages that are not sent again.", lambda each: each.num_webhooks_given_up),
)
_BATCH_GAUGES: Sequence[tuple[str, str, Callable[[BatchCounts], int]]] = (
    ("webhooks_pending", "Messages that have still to arrive.", lambda each: each.num_webhooks_pending),
    ("batches_paused", "Batches that wait for their storage.", lambda each: each.num_paused),
)
