"""Exports metrics under vLLM's names, which dashboards, autoscalers and gateways for language models expect.

Names, types and meanings follow vLLM (https://docs.vllm.ai, "Production metrics"), with one value for each model.
vLLM's names contain a colon. This is legal, although Prometheus' conventions reserve the colon for rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric

from app.metrics.families import Family, Labels, metrics_of
from app.metrics.reports import EngineCounts, EngineGauges
from app.metrics.requests import ModelSnapshot


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The measurements of one model's requests in all ingresses, and the reports of its replicas."""

    name: str
    requests: ModelSnapshot
    replicas: Sequence[EngineGauges]  # gauges of the current replicas
    ever: EngineCounts  # counts of all replicas, including stopped ones

    def now(self, value: Callable[[EngineGauges], int]) -> int:
        """Return the sum of a gauge over the current replicas."""
        return sum(map(value, self.replicas))

    @property
    def kv_usage(self) -> float:
        num_blocks = self.now(lambda engine: engine.num_blocks)
        return 1.0 - self.now(lambda engine: engine.num_free_blocks) / num_blocks if num_blocks else 0.0


def vllm_families(reports: Sequence[ModelReport]) -> Iterable[Metric]:
    """Return all families with vLLM's names. Calls without a known model are left out."""
    return metrics_of(_FAMILIES, ("model_name",), [((model.name,), model) for model in reports if model.name])


def _num_waiting(model: ModelReport) -> float:
    return model.now(lambda engine: engine.num_waiting)


def _memory(model: ModelReport) -> dict[Labels, int]:
    """Return each distinct pair of block size and number of blocks among the replicas, with the value 1."""
    memories = sorted({(each.block_size, each.num_blocks) for each in model.replicas})
    return dict.fromkeys(((str(size), str(number)) for size, number in memories), 1)


def _adapters(model: ModelReport) -> dict[Labels, int]:
    """Return one entry. Its labels are a replica's limit, the loaded names, and the names that requests wait for."""
    most = max((each.max_adapters for each in model.replicas), default=0)
    loaded = sorted({name for each in model.replicas for name in each.adapters})
    waiting = sorted({name for each in model.replicas for name in each.waiting_adapters})
    return {(str(most), ",".join(loaded), ",".join(waiting)): 1}


_FAMILIES: Sequence[Family[ModelReport]] = (
    Family("gauge", "vllm:num_requests_running", "Requests in the engines' batches.",
        lambda model: model.now(lambda engine: engine.num_running)),
    Family("gauge", "vllm:num_requests_waiting", "Requests in the engines' queues.", _num_waiting),
    Family("gauge", "vllm:kv_cache_usage_perc", "Used share of the KV memory, 0 to 1.", lambda model: model.kv_usage),
    Family("gauge", "vllm:gpu_cache_usage_perc", "The older name of vllm:kv_cache_usage_perc.",
        lambda model: model.kv_usage),
    Family("gauge", "vllm:num_requests_waiting_by_reason",
        "Requests in the engines' queues. All of them wait for a slot, for memory or for their batch.",
        lambda model: {"capacity": _num_waiting(model)}, ("reason",)),
    Family("gauge", "vllm:cache_config_info", "The size of a replica's KV memory.", _memory,
        ("block_size", "num_gpu_blocks")),
    Family("gauge", "vllm:lora_requests_info", "LoRA adapters that are loaded or awaited on any replica.", _adapters,
        ("max_lora", "running_lora_adapters", "waiting_lora_adapters")),
    Family("counter", "vllm:num_preemptions", "Preemptions, each of which frees a request's memory.",
        lambda model: model.ever.num_preemptions),
    Family("counter", "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
        lambda model: model.ever.num_prompt_tokens),
    Family("counter", "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.",
        lambda model: model.ever.num_cached_tokens),
    Family("counter", "vllm:prompt_tokens", "Prompt tokens of requests.",
        lambda model: model.requests.prompt_tokens.total),
    Family("counter", "vllm:generation_tokens", "Tokens generated.", lambda model: model.requests.num_generated_tokens),
    Family("counter", "vllm:request_success", "Requests that ended.", lambda model: model.requests.finished,
        ("finished_reason",)),
    Family("counter", "vllm:admission_rejections", "Calls refused.", lambda model: model.requests.refused, ("reason",)),
    Family("histogram", "vllm:iteration_tokens_total", "Tokens in one step.",
        lambda model: model.ever.step_tokens),
    Family("histogram", "vllm:request_queue_time_seconds", "Time from a request's arrival to its first step.",
        lambda model: model.ever.queue_s),
    Family("histogram", "vllm:request_prefill_time_seconds", "Time from a request's first step to its first token.",
        lambda model: model.ever.prefill_s),
    Family("histogram", "vllm:request_decode_time_seconds", "Time from a request's first token to its end.",
        lambda model: model.requests.decode_s),
    Family("histogram", "vllm:time_to_first_token_seconds", "Time from a call's arrival to a request's first token.",
        lambda model: model.requests.first_token_s),
    Family("histogram", "vllm:inter_token_latency_seconds", "Time between two tokens of a request.",
        lambda model: model.requests.inter_token_s),
    Family("histogram", "vllm:request_time_per_output_token_seconds", "A request's mean time per token.",
        lambda model: model.requests.token_s),
    Family("histogram", "vllm:e2e_request_latency_seconds", "Time from a call's arrival to a request's end.",
        lambda model: model.requests.request_s),
    Family("histogram", "vllm:request_prompt_tokens", "Prompt tokens of a request.",
        lambda model: model.requests.prompt_tokens),
    Family("histogram", "vllm:request_generation_tokens", "Generated tokens of a request.",
        lambda model: model.requests.generated_tokens),
    Family("histogram", "vllm:request_max_num_generation_tokens", "Tokens of the longest choice of a call.",
        lambda model: model.requests.longest_choice_tokens),
    Family("histogram", "vllm:request_params_n", "Choices requested in one call.",
        lambda model: model.requests.num_choices),
)  # fmt: skip
