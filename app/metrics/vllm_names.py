"""The metrics under vLLM's names, which dashboards, autoscalers and gateways for language models look for.

Names, types and meanings as vLLM has them: https://docs.vllm.ai, "Production metrics". One value for each model. A name
with a colon is legal though Prometheus' conventions keep it for rules: vLLM writes it so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from app.engine.histogram import SECONDS, TOKENS, Bounds, Distribution, sum_distributions
from app.engine.stats import EngineMeasurements, EngineStats
from app.metrics.families import by_reason, counter, gauge, histogram
from app.metrics.reports import EngineReport
from app.metrics.requests import ModelSnapshot

_MODEL = ("model_name",)


@dataclass(frozen=True, slots=True)
class ModelReport:
    """One model as a whole: what the ingresses measured of its requests, and what its replicas reported."""

    name: str
    requests: ModelSnapshot
    replicas: Sequence[EngineReport]
    gone: Sequence[EngineReport]

    def now(self, value: Callable[[EngineStats], float]) -> float:
        """A gauge, summed over the replicas that are there."""
        return sum(value(report.stats) for report in self.replicas)

    def ever(self, value: Callable[[EngineStats], float]) -> float:
        """A counter, summed over all replicas there have been."""
        return sum(value(report.stats) for report in (*self.replicas, *self.gone))

    def distribution(self, value: Callable[[EngineMeasurements], Distribution], bounds: Bounds) -> Distribution:
        """A distribution over all replicas there have been."""
        return sum_distributions((value(report.measurements) for report in (*self.replicas, *self.gone)), bounds)

    @property
    def kv_usage(self) -> float:
        num_blocks = self.now(lambda stats: stats.num_blocks)
        return 1.0 - self.now(lambda stats: stats.num_free_blocks) / num_blocks if num_blocks else 0.0


def vllm_families(reports: Sequence[ModelReport]) -> Iterable[Metric]:
    """All families with vLLM's names, for the models that have one."""
    models = [model for model in reports if model.name]
    for name, text, value in _GAUGES:
        yield gauge(f"vllm:{name}", text, _MODEL, [((model.name,), value(model)) for model in models])
    yield from _infos(models)
    for name, text, value in _COUNTERS:
        yield counter(f"vllm:{name}", text, _MODEL, [((model.name,), value(model)) for model in models])
    for name, text, label, counts in _COUNTERS_BY_REASON:
        yield by_reason(f"vllm:{name}", text, label, [(model.name, counts(model)) for model in models])
    for name, text, spread in _HISTOGRAMS:
        yield histogram(f"vllm:{name}", text, _MODEL, [((model.name,), spread(model)) for model in models])


def _infos(models: Sequence[ModelReport]) -> Iterable[Metric]:
    """Gauges with labels of their own."""
    yield gauge(
        "vllm:num_requests_waiting_by_reason",
        "Requests in the engines' queues; all of them wait for a slot, for memory or for their batch.",
        ("model_name", "reason"),
        [((model.name, "capacity"), _num_waiting(model)) for model in models],
    )
    yield gauge(
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
    yield gauge(
        "vllm:lora_requests_info",
        "LoRA adapters; there are none.",
        ("model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        [((model.name, "0", "", ""), 1) for model in models],
    )


def _num_waiting(model: ModelReport) -> float:
    return model.now(lambda stats: stats.num_waiting)


def _ever(value: Callable[[EngineStats], float]) -> Callable[[ModelReport], float]:
    return lambda model: model.ever(value)


def _measured(
    value: Callable[[EngineMeasurements], Distribution], bounds: Bounds
) -> Callable[[ModelReport], Distribution]:
    return lambda model: model.distribution(value, bounds)


_GAUGES: Sequence[tuple[str, str, Callable[[ModelReport], float]]] = (
    (
        "num_requests_running",
        "Requests in the engines' batches.",
        lambda model: model.now(lambda stats: stats.num_running),
    ),
    ("num_requests_waiting", "Requests in the engines' queues.", _num_waiting),
    ("kv_cache_usage_perc", "Used share of the KV memory, 0 to 1.", lambda model: model.kv_usage),
    ("gpu_cache_usage_perc", "The older name of vllm:kv_cache_usage_perc.", lambda model: model.kv_usage),
)
_COUNTERS: Sequence[tuple[str, str, Callable[[ModelReport], float]]] = (
    ("num_preemptions", "Times that a request's memory was taken back.", _ever(lambda stats: stats.total_preemptions)),
    (
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        _ever(lambda stats: stats.total_prompt_tokens),
    ),
    (
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        _ever(lambda stats: stats.total_cached_tokens),
    ),
    ("prompt_tokens", "Prompt tokens of requests.", lambda model: model.requests.prompt_tokens.total),
    ("generation_tokens", "Tokens generated.", lambda model: model.requests.num_generated_tokens),
)
_COUNTERS_BY_REASON: Sequence[tuple[str, str, str, Callable[[ModelReport], Mapping[str, float]]]] = (
    ("request_success", "Requests that ended.", "finished_reason", lambda model: model.requests.finished),
    ("admission_rejections", "Calls refused.", "reason", lambda model: model.requests.refused),
)
_HISTOGRAMS: Sequence[tuple[str, str, Callable[[ModelReport], Distribution]]] = (
    ("iteration_tokens_total", "Tokens in one step.", _measured(lambda engine: engine.step_tokens, TOKENS)),
    ("request_queue_time_seconds", "From arrival to first step.", _measured(lambda engine: engine.queue_s, SECONDS)),
    (
        "request_prefill_time_seconds",
        "From first step to first token.",
        _measured(lambda engine: engine.prefill_s, SECONDS),
    ),
    ("request_decode_time_seconds", "From first token to end.", lambda model: model.requests.decode_s),
    ("time_to_first_token_seconds", "From arrival to first token.", lambda model: model.requests.first_token_s),
    ("inter_token_latency_seconds", "Between two tokens.", lambda model: model.requests.inter_token_s),
    ("request_time_per_output_token_seconds", "A request's mean.", lambda model: model.requests.token_s),
    ("e2e_request_latency_seconds", "From arrival to end.", lambda model: model.requests.request_s),
    ("request_prompt_tokens", "Prompt tokens of a request.", lambda model: model.requests.prompt_tokens),
    ("request_generation_tokens", "Tokens of an answer.", lambda model: model.requests.generated_tokens),
    (
        "request_max_num_generation_tokens",
        "Tokens of the longest answer of a call.",
        lambda model: model.requests.longest_choice_tokens,
    ),
    ("request_params_n", "Answers asked for in one call.", lambda model: model.requests.num_choices),
)
