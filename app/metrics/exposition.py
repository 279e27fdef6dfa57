"""Writes the measurements of ingresses and replicas as Prometheus text.

Metrics with vLLM's names (`vllm_names.py`) have one value for each model. Metrics with `carousel_*` names have one
value for each replica if replicas measure them. Each replica writes its own samples (`replica_metrics`). An ingress
declares the families of these samples and inserts the lines of all replicas (`pieces`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from app.engine.stats import SleepState, SleepStats, StoreStats
from app.engine.tuner import Tuning
from app.metrics.event_loop import LoopSnapshot
from app.metrics.families import Family, Labels, metrics_of
from app.metrics.reports import EngineCounts, EngineReport, ReplicaMetrics, counts_of, gauges_of, sum_counts
from app.metrics.requests import Latencies, ModelSnapshot, Snapshot, merge, without_requests
from app.metrics.vllm_names import ModelReport, vllm_families

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
_PIECE_BYTES = 256 * 1024  # smallest size of a piece; a histogram of a thousand replicas fills 3 MB


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """The measurements for one response of `/metrics`."""

    requests: Sequence[Snapshot]  # one for each ingress that answered
    replicas: Mapping[str, Sequence[ReplicaMetrics]]  # the replicas that answered, by the model's name
    # Counts of all replicas, by model. They include replicas that have stopped or did not answer.
    ever: Mapping[str, Sequence[EngineCounts]] = field(default_factory=dict)
    gone_requests: Sequence[Snapshot] = ()  # snapshots of ingresses that have stopped or did not answer
    loops: Mapping[tuple[str, str], LoopSnapshot] = field(default_factory=dict)  # by a process's kind and its id
    # `LocalBatchService.counts` of the batches process; empty if the process did not answer.
    batches: Mapping[str, int] = field(default_factory=dict)
    # For each model with autoscaling, the desired number of replicas, the cause, and the reason in words.
    wanted: Mapping[str, tuple[int, str, str]] = field(default_factory=dict)
    num_missing: int = 0  # ingresses and replicas that did not answer in time


def exposition(scrape: Scrape) -> bytes:
    """Return the text of `/metrics` as one piece."""
    return b"".join(pieces(scrape))


def pieces(scrape: Scrape) -> Iterator[bytes]:
    """Yield the text of `/metrics` in pieces, so that an event loop can do other work in between."""
    reports = [each for several in scrape.replicas.values() for each in several]
    piece: list[bytes] = []
    num_bytes = 0
    for family in _families(scrape):
        name, text = family.name, _text(family)
        if name in _OF_REPLICAS:
            text = b"".join([text, *(each.lines[name] for each in reports if name in each.lines)])
        piece.append(text)
        num_bytes += len(text)
        if num_bytes >= _PIECE_BYTES:
            yield b"".join(piece)
            piece, num_bytes = [], 0
    yield b"".join(piece)


def replica_metrics(model_name: str, report: EngineReport, use: Mapping[str, float]) -> ReplicaMetrics:
    """Return the metrics that a replica sends for a scrape. `use` holds the values for an autoscaling policy."""
    labels, measurements = (model_name, report.replica_id, report.group), report.measurements
    tables: list[tuple[Sequence[Family[Any]], Labels, Labels, object]] = [
        (_REPLICAS, _REPLICA, labels, report),
        (_ADAPTERS, _REPLICA, labels, measurements.adapters),
        (_STORES, _REPLICA, labels, measurements.store),
        (_TUNING, _REPLICA, labels, measurements.tuning),
        (_SLEEP, _REPLICA, labels, measurements.sleep),
        (_LOOPS, _LOOP, ("replica", report.replica_id), report.loop),
    ]
    families = [
        family
        for table, names, values, source in tables
        if source is not None
        for family in metrics_of(table, names, [(values, source)])
        if family.samples
    ]
    return ReplicaMetrics(
        {family.name: _without_head(_text(family)) for family in families},
        counts_of(report),
        gauges_of(report),
        dict(use),
    )


def _families(scrape: Scrape) -> Iterator[Metric]:
    """Yield all families, without the samples that replicas write."""
    models = [
        ModelReport(
            name,
            requests,
            [each.gauges for each in scrape.replicas.get(name, ())],
            sum_counts(scrape.ever.get(name, ())),
        )
        for name, requests in merge([*scrape.requests, *map(without_requests, scrape.gone_requests)]).items()
    ]
    requests = [((model.name,), model.requests) for model in models]
    named = [row for row in requests if row[0][0]]
    latencies = [((*labels, *kind), each) for labels, model in named for kind, each in model.latencies.items()]
    wanted = [((name, why), number) for name, (number, why, _) in scrape.wanted.items()]
    yield from metrics_of(_CALLS, ("model_name",), requests)
    yield from metrics_of(_LATENCIES, ("model_name", "group", "class"), latencies)
    yield from metrics_of(_REQUESTS, ("model_name",), named)
    yield from metrics_of(_SERVICE, (), [((), scrape)])
    yield from metrics_of(_WANTED, ("model_name", "reason"), wanted)
    for table in (_REPLICAS, _ADAPTERS, _STORES, _TUNING, _SLEEP):
        yield from metrics_of(table, _REPLICA, [])
    yield from metrics_of(_LOOPS, _LOOP, list(scrape.loops.items()))
    if scrape.batches:
        yield from metrics_of(_BATCHES, (), [((), scrape.batches)])
    yield from vllm_families(models)


class _Families(Collector):
    """Wraps finished families in the collector interface that prometheus_client requires."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _text(family: Metric) -> bytes:
    return generate_latest(_Families([family]))


def _without_head(text: bytes) -> bytes:
    """Return the samples of one family, without the two lines for its help and type."""
    return text.split(b"\n", 2)[2]


_REPLICA = ("model_name", "replica", "group")
_LOOP = ("process", "id")

# The ingresses' measurements by model. Measurements that have a vLLM name are exported only under that name. Calls that
# were refused before their model was known have an empty model name.
_CALLS: Sequence[Family[ModelSnapshot]] = (
    Family("gauge", "carousel_requests_in_flight", "Requests that the ingresses are answering.",
        lambda model: model.num_in_flight),
    Family("counter", "carousel_requests_finished", "Requests that ended, by finish reason.",
        lambda model: model.finished, ("reason",)),
    Family("counter", "carousel_calls_refused", "Calls that ended with an error before their first token.",
        lambda model: model.refused, ("reason",)),
    Family("counter", "carousel_calls_failed", "Calls that ended with an error after their first token.",
        lambda model: model.failed, ("reason",)),
    Family("counter", "carousel_dispatches", "Dispatch decisions, by policy.",
        lambda model: model.dispatched, ("reason",)),
    Family("counter", "carousel_resumes", "Requests that resumed on another replica, by reason.",
        lambda model: model.resumed, ("reason",)),
)  # fmt: skip
_LATENCIES: Sequence[Family[Latencies]] = (
    Family("histogram", "carousel_first_token_seconds", "Time from a call's arrival to a request's first token.",
        lambda times: times.first_token_s),
    Family("histogram", "carousel_inter_token_seconds", "Time between two tokens of a request.",
        lambda times: times.inter_token_s),
    Family("histogram", "carousel_request_seconds", "Time from a call's arrival to a request's end.",
        lambda times: times.request_s),
    Family("histogram", "carousel_request_queue_seconds",
        "Time from a request's arrival at its replica to its first step.", lambda times: times.queue_s),
)  # fmt: skip
_REQUESTS: Sequence[Family[ModelSnapshot]] = (
    Family("histogram", "carousel_prompt_tokens", "Prompt tokens of a request.", lambda model: model.prompt_tokens),
    Family("histogram", "carousel_generated_tokens", "Tokens generated for a request.",
        lambda model: model.generated_tokens),
    Family("histogram", "carousel_frame_deltas", "Requests with tokens in one frame from a replica.",
        lambda model: model.deltas_per_frame),
)  # fmt: skip
_SERVICE: Sequence[Family[Scrape]] = (
    Family("gauge", "carousel_scrape_missing", "Processes that did not answer this scrape in time.",
        lambda scrape: scrape.num_missing),
    Family("gauge", "carousel_ingresses", "Ingresses that answered this scrape.",
        lambda scrape: sum(process == "ingress" for process, _ in scrape.loops)),
)  # fmt: skip
_WANTED: Sequence[Family[int]] = (
    Family("gauge", "carousel_replicas_wanted", "Replicas that the model should run, by cause.", lambda n: n),
)
_REPLICAS: Sequence[Family[EngineReport]] = (
    Family("gauge", "carousel_slots", "Maximum requests in one step.", lambda each: each.measurements.max_running),
    Family("gauge", "carousel_slots_used", "Running requests.", lambda each: each.stats.num_running),
    Family("gauge", "carousel_queue_requests", "Waiting requests.", lambda each: each.stats.num_waiting),
    Family("gauge", "carousel_queue_tokens", "Prompt tokens of waiting requests.",
        lambda each: each.stats.num_waiting_tokens),
    Family("gauge", "carousel_queue_wait_seconds", "Estimated wait of a request that arrives now.",
        lambda each: each.stats.estimated_wait_s),
    Family("gauge", "carousel_outstanding_tokens", "Predicted tokens that all requests still need computed.",
        lambda each: each.measurements.num_outstanding_tokens),
    Family("gauge", "carousel_batch_size", "The strategy's target for requests in a batch; 0 without batches.",
        lambda each: each.stats.batch_size),
    Family("gauge", "carousel_kv_blocks", "Blocks of KV memory.", lambda each: each.stats.num_blocks),
    Family("gauge", "carousel_kv_blocks_free", "Blocks that can be allocated, including cached blocks.",
        lambda each: each.stats.num_free_blocks),
    Family("gauge", "carousel_state_slots", "Slots for the states of recurrent layers.",
        lambda each: each.stats.num_state_slots),
    Family("gauge", "carousel_state_slots_free", "Slots that a new sequence can use, including snapshots' slots.",
        lambda each: each.stats.num_free_state_slots),
    Family("gauge", "carousel_length_error_tokens", "Recent mean error of predicted output lengths, in tokens.",
        lambda each: each.stats.mean_length_error_tokens),
    Family("gauge", "carousel_settings_info", "Version of the scheduling settings: their names and a hash.",
        lambda each: {each.stats.settings: 1}, ("settings",)),
    Family("counter", "carousel_engine_steps", "Steps run.", lambda each: each.stats.total_steps),
    Family("counter", "carousel_engine_prompt_tokens", "Prompt tokens of admitted requests.",
        lambda each: each.stats.total_prompt_tokens),
    Family("counter", "carousel_engine_cached_tokens", "Prompt tokens found in the prefix cache.",
        lambda each: each.stats.total_cached_tokens),
    Family("counter", "carousel_engine_unresumable_tokens",
        "Prompt tokens with cached keys and values that are recomputed because no state after them is stored.",
        lambda each: each.stats.total_unresumable_tokens),
    Family("counter", "carousel_engine_generated_tokens", "Tokens generated.",
        lambda each: each.stats.total_generated_tokens),
    Family("counter", "carousel_engine_preemptions", "Preemptions, each of which frees a request's memory.",
        lambda each: each.stats.total_preemptions),
    Family("counter", "carousel_engine_memory_preemptions", "Preemptions to free memory for running requests.",
        lambda each: each.stats.total_memory_preemptions),
    Family("counter", "carousel_engine_drafted_tokens", "Draft tokens that were verified.",
        lambda each: each.stats.total_drafted_tokens),
    Family("counter", "carousel_engine_accepted_tokens", "Draft tokens that were accepted.",
        lambda each: each.stats.total_accepted_tokens),
    Family("counter", "carousel_engine_finished", "Requests that ended with a stop or at their length limit.",
        lambda each: each.stats.total_finished),
    Family("counter", "carousel_engine_aborted", "Requests that their callers aborted.",
        lambda each: each.stats.total_aborted),
    Family("counter", "carousel_engine_failed", "Requests that ended because a step failed.",
        lambda each: each.stats.total_failed),
    Family("counter", "carousel_engine_missed", "Requests that missed their deadline.",
        lambda each: each.stats.total_missed),
    Family("counter", "carousel_graph_padding_tokens",
        "Padding tokens that steps computed because graphs exist for only a few sizes.",
        lambda each: each.measurements.num_padding_tokens),
    Family("counter", "carousel_steps_without_graph", "Steps on a GPU that were launched kernel by kernel.",
        lambda each: each.measurements.num_steps_without_graph),
    Family("gauge", "carousel_backend", "1 for the backend in use on a GPU; graphs is the fastest.",
        lambda each: {backend.name: 1} if (backend := each.measurements.backend) else {}, ("backend",)),
    Family("gauge", "carousel_backends_failed", "Faster GPU backends that do not work on this machine.",
        lambda each: len(backend.failed) if (backend := each.measurements.backend) else 0),
    Family("histogram", "carousel_step_seconds", "Duration of one step.", lambda each: each.measurements.step_s),
    Family("histogram", "carousel_step_tokens", "Tokens computed in one step.",
        lambda each: each.measurements.step_tokens),
    Family("histogram", "carousel_step_requests", "Requests in one step.",
        lambda each: each.measurements.step_requests),
    Family("histogram", "carousel_queue_seconds", "Time from a request's arrival to its first step.",
        lambda each: each.measurements.queue_s),
    Family("histogram", "carousel_prefill_seconds", "Time from a request's first step to its first token.",
        lambda each: each.measurements.prefill_s),
)  # fmt: skip
_ADAPTERS: Sequence[Family[Any]] = (
    Family("gauge", "carousel_adapters_loaded", "LoRA adapters in memory.", lambda adapters: len(adapters.loaded)),
    Family("counter", "carousel_adapter_loads",
        "Loads of LoRA adapters, including repeated loads of adapters that were unloaded.",
        lambda adapters: adapters.num_loads),
)  # fmt: skip
# Replicas that store blocks outside their KV memory.
_STORES: Sequence[Family[StoreStats]] = (
    Family("counter", "carousel_tier_tokens", "Tokens that were not computed because their blocks were fetched.",
        lambda store: store.num_fetched_tokens),
    Family("counter", "carousel_tier_bytes", "Bytes of KV blocks moved from or to the tier or other replicas.",
        lambda store: store.bytes_moved, ("direction",)),
    Family("counter", "carousel_tier_given_up", "Fetches that were abandoned because they took too long.",
        lambda store: store.num_given_up),
)  # fmt: skip
# Replicas that have targets.
_TUNING: Sequence[Family[Tuning]] = (
    Family("gauge", "carousel_limit", "Current limits, which the tuner adjusts to meet the targets.",
        lambda tuning: tuning.limits._asdict(), ("limit",)),
    Family("gauge", "carousel_limits_info", "The reason for the current limits.",
        lambda tuning: {str(tuning.reason): 1}, ("reason",)),
    Family("gauge", "carousel_target_p99_seconds",
        "99th percentiles, over the last half minute, of the latencies that have targets.",
        lambda tuning: {"ttft_p99": tuning.ttft_p99_s, "itl_p99": tuning.itl_p99_s}, ("target",)),
    Family("gauge", "carousel_targets_missed", "1 while a target is missed and other limits would not help.",
        lambda tuning: tuning.is_missed),
    Family("counter", "carousel_limit_changes", "Changes of limits since the settings were last set.",
        lambda tuning: tuning.num_changes),
)  # fmt: skip
_SLEEP: Sequence[Family[SleepStats]] = (
    Family("gauge", "carousel_sleep_state", "1 for the current state of a replica with sleep_after_s.",
        lambda sleep: {str(state): sleep.state == state for state in SleepState}, ("state",)),
    Family("counter", "carousel_wakes", "Times that a replica woke and allocated its memory again.",
        lambda sleep: sleep.num_wakes),
    Family("counter", "carousel_waking_seconds", "Seconds that replicas took to wake.", lambda sleep: sleep.waking_s),
    Family("counter", "carousel_device_queue_seconds", "Seconds that requests waited for memory used by other models.",
        lambda sleep: sleep.queued_s),
    Family("counter", "carousel_turns_ended", "Times that a replica with requests slept because other models waited.",
        lambda sleep: sleep.num_turns_ended),
)  # fmt: skip
# The event loop of each process that serves requests.
_LOOPS: Sequence[Family[LoopSnapshot]] = (
    Family("histogram", "carousel_loop_delay_seconds", "How late an event loop woke.", lambda loop: loop.delay_s),
    Family("counter", "carousel_loop_stalls", "Times that an event loop woke more than 50 ms late.",
        lambda loop: loop.num_stalls),
    Family("counter", "carousel_loop_stalled_seconds", "Sum of an event loop's delays above 50 ms.",
        lambda loop: loop.stalled_s),
    Family("gauge", "carousel_loop_tasks", "Unfinished tasks of an event loop.", lambda loop: loop.num_tasks),
    Family("gauge", "carousel_thread_queue", "Calls waiting for a thread in an event loop's process.",
        lambda loop: loop.queued, ("threads",)),
)  # fmt: skip
# Counts in the batches process since it opened its folder. The gauges are current values.
_BATCHES: Sequence[Family[Mapping[str, int]]] = (
    Family("counter", "carousel_batch_lines_completed", "Batch lines that were answered.",
        itemgetter("num_lines_completed")),
    Family("counter", "carousel_batch_lines_failed", "Batch lines that ended with an error.",
        itemgetter("num_lines_failed")),
    Family("counter", "carousel_webhook_attempts", "Attempts to send webhook messages, including retries.",
        itemgetter("num_webhook_attempts")),
    Family("counter", "carousel_webhooks_delivered", "Webhook messages that were delivered.",
        itemgetter("num_webhooks_delivered")),
    Family("counter", "carousel_webhooks_given_up", "Webhook messages that failed and will not be retried.",
        itemgetter("num_webhooks_given_up")),
    Family("gauge", "carousel_webhooks_pending", "Webhook messages that have not been delivered yet.",
        itemgetter("num_webhooks_pending")),
    Family("gauge", "carousel_batches_paused", "Batches that are waiting for storage.", itemgetter("num_paused")),
)  # fmt: skip

# Families whose samples replicas send.
_OF_REPLICAS = frozenset(
    family.name for table in (_REPLICAS, _ADAPTERS, _STORES, _TUNING, _SLEEP, _LOOPS) for family in table
)
