"""What ingresses and replicas have measured, as Prometheus text.

Two sets of names: vLLM's, which dashboards, autoscalers and gateways for language models look for, one value for each
model; and our own, `carousel_*`, which also tell the replicas apart. A name with a colon is legal though Prometheus'
conventions keep it for rules: it is vLLM's, and can be switched off.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from app.engine.histogram import SECONDS, TOKENS, Bounds, Distribution, sum_distributions
from app.engine.stats import EngineMeasurements, EngineStats
from app.metrics.batches import BatchCounts
from app.metrics.replicas import EngineReport
from app.metrics.requests import ModelSnapshot, Snapshot, merge

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """Everything that is told at one moment."""

    requests: Sequence[Snapshot]  # one for each ingress that answered
    replicas: Mapping[str, Sequence[EngineReport]]  # by the model's name; those that answered
    gone: Mapping[str, Sequence[EngineReport]] = field(default_factory=dict)  # those that did once: their counts remain
    batches: Sequence[BatchCounts] = ()  # of the one process that works them off, where it has answered
    num_missing: int = 0  # ingresses and replicas that did not answer in time


def exposition(scrape: Scrape, *, vllm_names: bool = True) -> bytes:
    """The text of `/metrics`."""
    models = _models(scrape)
    families = [*_request_families(models), *_replica_families(scrape), *_batch_families(scrape.batches)]
    if vllm_names:
        families += _vllm_families(models)
    return generate_latest(_Families(families))


class _Families(Collector):
    """Families that are there already, in the form in which prometheus_client wants to be given them."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


@dataclass(frozen=True, slots=True)
class _Model:
    """One model as a whole."""

    name: str
    requests: ModelSnapshot
    replicas: Sequence[EngineReport]
    gone: Sequence[EngineReport]

    def now(self, value: Callable[[EngineStats], float]) -> float:
        """A gauge, summed over the replicas that are there."""
        return sum(value(report.stats) for report in self.replicas)

    def ever(self, value: Callable[[EngineStats], float]) -> float:
        """A counter, summed over all that have been there."""
        return sum(value(report.stats) for report in (*self.replicas, *self.gone))

    def distribution(self, value: Callable[[EngineMeasurements], Distribution], bounds: Bounds) -> Distribution:
        """Of all that have been there."""
        return sum_distributions((value(report.measurements) for report in (*self.replicas, *self.gone)), bounds)

    @property
    def kv_usage(self) -> float:
        num_blocks = self.now(lambda stats: stats.num_blocks)
        return 1.0 - self.now(lambda stats: stats.num_free_blocks) / num_blocks if num_blocks else 0.0


def _models(scrape: Scrape) -> list[_Model]:
    return [
        _Model(name, requests, scrape.replicas.get(name, ()), scrape.gone.get(name, ()))
        for name, requests in merge(scrape.requests).items()
    ]


# ---------------------------------------------------------------------- vLLM's names


def _vllm_families(models: Sequence[_Model]) -> Iterable[Metric]:
    """Names, types and meanings as vLLM has them; https://docs.vllm.ai, "Production metrics"."""
    models = [model for model in models if model.name]

    def gauge(name: str, text: str, value: Callable[[_Model], float]) -> Metric:
        return _gauge(f"vllm:{name}", text, ("model_name",), [((model.name,), value(model)) for model in models])

    def counter(name: str, text: str, value: Callable[[_Model], float]) -> Metric:
        return _counter(f"vllm:{name}", text, ("model_name",), [((model.name,), value(model)) for model in models])

    def counters(name: str, text: str, label: str, values: Callable[[_Model], Mapping[str, float]]) -> Metric:
        return _by_reason(f"vllm:{name}", text, label, [(model.name, values(model)) for model in models])

    def histogram(name: str, text: str, value: Callable[[_Model], Distribution]) -> Metric:
        return _histogram(f"vllm:{name}", text, ("model_name",), [((model.name,), value(model)) for model in models])

    def measured(name: str, text: str, value: Callable[[EngineMeasurements], Distribution], bounds: Bounds) -> Metric:
        return histogram(name, text, lambda model: model.distribution(value, bounds))

    yield gauge("num_requests_running", "Requests in the engines' batches.", lambda m: m.now(_num_running))
    yield gauge("num_requests_waiting", "Requests in the engines' queues.", lambda m: m.now(_num_waiting))
    yield _gauge(
        "vllm:num_requests_waiting_by_reason",
        "Requests in the engines' queues; all of them wait for a slot, for memory or for their batch.",
        ("model_name", "reason"),
        [((model.name, "capacity"), model.now(_num_waiting)) for model in models],
    )
    yield gauge("kv_cache_usage_perc", "Used share of the KV memory, 0 to 1.", lambda m: m.kv_usage)
    yield gauge("gpu_cache_usage_perc", "The older name of vllm:kv_cache_usage_perc.", lambda m: m.kv_usage)
    yield _gauge(
        "vllm:cache_config_info",
        "The KV memory of one replica.",
        ("model_name", "block_size", "num_gpu_blocks"),
        [
            ((model.name, str(block_size), str(num_blocks)), 1)
            for model in models
            for block_size, num_blocks in sorted(
                {(each.measurements.block_size, each.stats.num_blocks) for each in model.replicas}
            )
        ],
    )
    yield _gauge(
        "vllm:lora_requests_info",
        "LoRA adapters; there are none.",
        ("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        [((model.name, "0", "", ""), 1) for model in models],
    )
    yield counter("num_preemptions", "Times that a request's memory was taken back.", lambda m: m.ever(_preemptions))
    yield counter(
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda m: m.ever(lambda stats: stats.total_prompt_tokens),
    )
    yield counter(
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda m: m.ever(lambda stats: stats.total_cached_tokens),
    )
    yield counter("prompt_tokens", "Prompt tokens of requests.", lambda m: m.requests.prompt_tokens.total)
    yield counter("generation_tokens", "Tokens generated.", lambda m: m.requests.num_generated_tokens)
    yield counters("request_success", "Requests that ended.", "finished_reason", lambda m: m.requests.finished)
    yield counters("admission_rejections", "Calls refused.", "reason", lambda m: m.requests.refused)
    yield measured("iteration_tokens_total", "Tokens in one step.", lambda measured: measured.step_tokens, TOKENS)
    yield measured("request_queue_time_seconds", "From arrival to first step.", lambda m: m.queue_s, SECONDS)
    yield measured("request_prefill_time_seconds", "From first step to first token.", lambda m: m.prefill_s, SECONDS)
    yield histogram("request_decode_time_seconds", "From first token to end.", lambda m: m.requests.decode_s)
    yield histogram("time_to_first_token_seconds", "From arrival to first token.", lambda m: m.requests.first_token_s)
    yield histogram("inter_token_latency_seconds", "Between two tokens.", lambda m: m.requests.inter_token_s)
    yield histogram("request_time_per_output_token_seconds", "A request's mean.", lambda m: m.requests.token_s)
    yield histogram("e2e_request_latency_seconds", "From arrival to end.", lambda m: m.requests.request_s)
    yield histogram("request_prompt_tokens", "Prompt tokens of a request.", lambda m: m.requests.prompt_tokens)
    yield histogram("request_generation_tokens", "Tokens of an answer.", lambda m: m.requests.generated_tokens)
    yield histogram(
        "request_max_num_generation_tokens",
        "Tokens of the longest answer of a call.",
        lambda m: m.requests.longest_choice_tokens,
    )
    yield histogram("request_params_n", "Answers asked for in one call.", lambda m: m.requests.num_choices)


def _num_running(stats: EngineStats) -> float:
    return stats.num_running


def _num_waiting(stats: EngineStats) -> float:
    return stats.num_waiting


def _preemptions(stats: EngineStats) -> float:
    return stats.total_preemptions


# ---------------------------------------------------------------------- our own names


def _request_families(models: Sequence[_Model]) -> Iterable[Metric]:
    """What the ingresses measure, by model. Some of it has no vLLM name; the rest is there under vLLM's alone."""
    yield _gauge(
        "carousel_requests_in_flight",
        "Requests that the ingresses are answering.",
        ("model_name",),
        [((model.name,), model.requests.num_in_flight) for model in models],
    )
    for name, text, values in _REASONS:
        yield _by_reason(f"carousel_{name}", text, "reason", [(each.name, values(each.requests)) for each in models])
    for name, text, value in _TIMES_AND_SIZES:
        rows = [((each.name,), value(each.requests)) for each in models if each.name]
        yield _histogram(f"carousel_{name}", text, ("model_name",), rows)


_REASONS: Sequence[tuple[str, str, Callable[[ModelSnapshot], Mapping[str, float]]]] = (
    ("requests_finished", "Requests that ended, by finish reason.", lambda model: model.finished),
    ("calls_refused", "Calls that ended with an error before their first token.", lambda model: model.refused),
    ("calls_failed", "Calls that ended with an error after their first token.", lambda model: model.failed),
    ("dispatches", "Decisions where to send a request, by what decided.", lambda model: model.dispatched),
    ("resumes", "Requests that went on at another replica, by what had happened.", lambda model: model.resumed),
)
_TIMES_AND_SIZES: Sequence[tuple[str, str, Callable[[ModelSnapshot], Distribution]]] = (
    ("first_token_seconds", "From a call's arrival to a request's first token.", lambda model: model.first_token_s),
    ("inter_token_seconds", "Between two tokens of a request.", lambda model: model.inter_token_s),
    ("request_seconds", "From a call's arrival to a request's end.", lambda model: model.request_s),
    ("prompt_tokens", "Prompt tokens of a request.", lambda model: model.prompt_tokens),
    ("generated_tokens", "Tokens generated for a request.", lambda model: model.generated_tokens),
    ("frame_deltas", "Requests with tokens in one frame from a replica.", lambda model: model.deltas_per_frame),
)

_LABELS = ("model_name", "replica", "group")


def _replica_families(scrape: Scrape) -> Iterable[Metric]:
    """What each engine counts and measures."""
    reports = [
        ((name, each.replica_id, each.group), each) for name, several in scrape.replicas.items() for each in several
    ]
    yield _gauge("carousel_scrape_missing", "Who did not answer this scrape in time.", (), [((), scrape.num_missing)])
    yield _gauge("carousel_ingresses", "Ingresses that answered this scrape.", (), [((), len(scrape.requests))])
    for name, text, value in _ENGINE_GAUGES:
        yield _gauge(f"carousel_{name}", text, _LABELS, [(labels, value(each)) for labels, each in reports])
    for name, text, count in _ENGINE_COUNTERS:
        yield _counter(f"carousel_{name}", text, _LABELS, [(labels, count(each.stats)) for labels, each in reports])
    for name, text, spread in _ENGINE_HISTOGRAMS:
        rows = [(labels, spread(each.measurements)) for labels, each in reports]
        yield _histogram(f"carousel_{name}", text, _LABELS, rows)


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
        "By how much output lengths are predicted wrong, of late.",
        lambda each: each.stats.mean_length_error_tokens,
    ),
)
_ENGINE_COUNTERS: Sequence[tuple[str, str, Callable[[EngineStats], float]]] = (
    ("engine_steps", "Steps.", lambda stats: stats.total_steps),
    ("engine_prompt_tokens", "Prompt tokens of admitted requests.", lambda stats: stats.total_prompt_tokens),
    ("engine_cached_tokens", "Of these, found in the prefix cache.", lambda stats: stats.total_cached_tokens),
    ("engine_generated_tokens", "Tokens generated.", lambda stats: stats.total_generated_tokens),
    ("engine_preemptions", "Times that a request's memory was taken back.", lambda stats: stats.total_preemptions),
    ("engine_finished", "Requests ended by stop or length.", lambda stats: stats.total_finished),
    ("engine_aborted", "Requests ended by their callers.", lambda stats: stats.total_aborted),
    ("engine_failed", "Requests ended by a failed step.", lambda stats: stats.total_failed),
    ("engine_missed", "Requests ended by their deadline.", lambda stats: stats.total_missed),
)
_ENGINE_HISTOGRAMS: Sequence[tuple[str, str, Callable[[EngineMeasurements], Distribution]]] = (
    ("step_seconds", "Time of one step.", lambda measured: measured.step_s),
    ("step_tokens", "Tokens computed in one step.", lambda measured: measured.step_tokens),
    ("queue_seconds", "From a request's arrival to its first step.", lambda measured: measured.queue_s),
    ("prefill_seconds", "From a request's first step to its first token.", lambda measured: measured.prefill_s),
)


def _batch_families(batches: Sequence[BatchCounts]) -> Iterable[Metric]:
    """None where there are no batches."""
    for name, text, count in _BATCH_COUNTERS if batches else ():
        yield _counter(f"carousel_{name}", text, (), [((), sum(map(count, batches)))])
    if batches:
        pending = sum(each.num_webhooks_pending for each in batches)
        yield _gauge("carousel_webhooks_pending", "Messages that have still to arrive.", (), [((), pending)])


_BATCH_COUNTERS: Sequence[tuple[str, str, Callable[[BatchCounts], int]]] = (
    ("batch_lines_completed", "Lines of batches that were answered.", lambda each: each.num_lines_completed),
    ("batch_lines_failed", "Lines of batches that ended with an error.", lambda each: each.num_lines_failed),
    ("webhook_attempts", "Messages sent to receivers, again too.", lambda each: each.num_webhook_attempts),
    ("webhooks_delivered", "Messages that have arrived.", lambda each: each.num_webhooks_delivered),
    ("webhooks_given_up", "Messages that are not sent again.", lambda each: each.num_webhooks_given_up),
)

# ---------------------------------------------------------------------- families

Labels = tuple[str, ...]


def _gauge(name: str, text: str, labels: Labels, rows: Iterable[tuple[Labels, float]]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, labels: Labels, rows: Iterable[tuple[Labels, float]]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _by_reason(name: str, text: str, label: str, models: Iterable[tuple[str, Mapping[str, float]]]) -> Metric:
    rows = [((model, reason), count) for model, counts in models for reason, count in counts.items()]
    return _counter(name, text, ("model_name", label), rows)


def _histogram(name: str, text: str, labels: Labels, rows: Iterable[tuple[Labels, Distribution]]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, spread in rows:
        family.add_metric(values, buckets=_buckets(spread), sum_value=spread.total)
    return family


def _buckets(spread: Distribution) -> list[tuple[str, float]]:
    bounds = [f"{bound:g}" for bound in spread.bounds]
    return list(zip([*bounds, "+Inf"], accumulate(spread.counts), strict=True))
