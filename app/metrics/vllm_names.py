"""The metrics under vLLM's names, which dashboards, autoscalers and gateways for language models look for.

Names, types and meanings as vLLM has them: https://docs.vllm.ai, "Production metrics". One value for each model. A name
with a colon is legal though Prometheus' conventions keep it for rules: vLLM writes it so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from app.engine.histogram import SECONDS, TOKENS, Bounds, Distribution, sum_distributions
from app.engine.stats import EngineMeasurements, EngineStats
from app.metrics.families import Family, Labels, metrics_of
from app.metrics.reports import EngineReport
from app.metrics.requests import ModelSnapshot


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
    return metrics_of(_FAMILIES, ("model_name",), [((model.name,), model) for model in reports if model.name])


def _num_waiting(model: ModelReport) -> float:
    return model.now(lambda stats: stats.num_waiting)


def _memory(model: ModelReport) -> dict[Labels, int]:
    """The different memories of its replicas."""
    return dict.fromkeys(
        (
            (str(size), str(number))
            for size, number in sorted(
                {(each.measurements.block_size, each.stats.num_blocks) for each in model.replicas}
            )
        ),
        1,
    )


def _adapters(model: ModelReport) -> dict[Labels, int]:
    """How many a replica may have loaded, the names of those that some replica has, and of those that wait."""
    several = [stats for each in model.replicas if (stats := each.measurements.adapters)]
    most = max((each.max_loaded for each in several), default=0)
    loaded = sorted({name for each in several for name in each.names})
    waiting = sorted({name for each in several for name in each.waiting_names})
    return {(str(most), ",".join(loaded), ",".join(waiting)): 1}


_FAMILIES: Sequence[Family[ModelReport]] = (
    Family("gauge", "vllm:num_requests_running", "Requests in the engines' batches.",
        lambda model: model.now(lambda stats: stats.num_running)),
    Family("gauge", "vllm:num_requests_waiting", "Requests in the engines' queues.", _num_waiting),
    Family("gauge", "vllm:kv_cache_usage_perc", "Used share of the KV memory, 0 to 1.", lambda model: model.kv_usage),
    Family("gauge", "vllm:gpu_cache_usage_perc", "The older name of vllm:kv_cache_usage_perc.",
        lambda model: model.kv_usage),
    Family("gauge", "vllm:num_requests_waiting_by_reason",
        "Requests in the engines' queues; all of them wait for a slot, for memory or for their batch.",
        lambda model: {"capacity": _num_waiting(model)}, ("reason",)),
    Family("gauge", "vllm:cache_config_info", "The KV memory of one replica.", _memory,
        ("block_size", "num_gpu_blocks")),
    Family("gauge", "vllm:lora_requests_info", "LoRA adapters: loaded at some replica, and waited for.", _adapters,
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters")),
    Family("counter", "vllm:num_preemptions", "Times that a request's memory was taken back.",
        lambda model: model.ever(lambda stats: stats.total_preemptions)),
    Family("counter", "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
        lambda model: model.ever(lambda stats: stats.total_prompt_tokens)),
    Family("counter", "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.",
        lambda model: model.ever(lambda stats: stats.total_cached_tokens)),
    Family("counter", "vllm:prompt_tokens", "Prompt tokens of requests.",
        lambda model: model.requests.prompt_tokens.total),
    Family("counter", "vllm:generation_tokens", "Tokens generated.", lambda model: model.requests.num_generated_tokens),
    Family("counter", "vllm:request_success", "Requests that ended.", lambda model: model.requests.finished,
        ("finished_reason",)),
    Family("counter", "vllm:admission_rejections", "Calls refused.", lambda model: model.requests.refused, ("reason",)),
    Family("histogram", "vllm:iteration_tokens_total", "Tokens in one step.",
        lambda model: model.distribution(lambda engine: engine.step_tokens, TOKENS)),
    Family("histogram", "vllm:request_queue_time_seconds", "From arrival to first step.",
        lambda model: model.distribution(lambda engine: engine.queue_s, SECONDS)),
    Family("histogram", "vllm:request_prefill_time_seconds", "From first step to first token.",
        lambda model: model.distribution(lambda engine: engine.prefill_s, SECONDS)),
    Family("histogram", "vllm:request_decode_time_seconds", "From first token to end.",
        lambda model: model.requests.decode_s),
    Family("histogram", "vllm:time_to_first_token_seconds", "From arrival to first token.",
        lambda model: model.requests.first_token_s),
    Family("histogram", "vllm:inter_token_latency_seconds", "Between two tokens.",
        lambda model: model.requests.inter_token_s),
    Family("histogram", "vllm:request_time_per_output_token_seconds", "A request's mean.",
        lambda model: model.requests.token_s),
    Family("histogram", "vllm:e2e_request_latency_seconds", "From arrival to end.",
        lambda model: model.requests.request_s),
    Family("histogram", "vllm:request_prompt_tokens", "Prompt tokens of a request.",
        lambda model: model.requests.prompt_tokens),
    Family("histogram", "vllm:request_generation_tokens", "Tokens of an answer.",
        lambda model: model.requests.generated_tokens),
    Family("histogram", "vllm:request_max_num_generation_tokens", "Tokens of the longest answer of a call.",
        lambda model: model.requests.longest_choice_tokens),
    Family("histogram", "vllm:request_params_n", "Answers asked for in one call.",
        lambda model: model.requests.num_choices),
)  # fmt: skip
