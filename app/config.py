"""All settings, as one frozen tree that is read once at the edge. Nothing here reads the environment.

A config says what was asked. What is measured (how many KV blocks fit, how long the model's context is) is returned
by the room that measured it and never written back.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo

GIB = 1024**3
MAX_LOADED_ADAPTERS = 8  # where the settings name no number
KvType = Literal["auto", "int8", "fp8"]  # of keys and values
Name = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9][A-Za-z0-9._/:-]*$")]


class Settings(BaseModel):
    """Base of every branch: frozen, and a misspelt field is an error, not silence."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ModelConfig(Settings):
    """Which weights to serve and how to hold them."""

    path: str = Field("models/demo", min_length=1, description="folder of a transformers model, GGUF file, or hub id")
    revision: str | None = Field(None, description="branch, tag or commit of a hub model")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="auto: bfloat16 on CUDA; on a CPU bfloat16 where the checkpoint is in it and the native decoder is "
        "fast in it, else float32",
    )
    quantization: Literal["none", "int8", "int4", "fp8"] = Field(
        "none",
        description="matrices in 8 or 4 bits, made at load. int8, int4: on a CPU, for models that the native decoder "
        "computes; fp8: on a GPU of compute capability 8.9 or more, for those of the CUDA decoder; refused for others",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    num_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="CPU threads of one replica's model; default: its share of the machine's cores",
    )
    backend: Literal["auto", "attention", "torch"] = Field(
        "auto",
        description="auto: the fastest code for the model and device; attention: transformers' code with the project's "
        "attention; torch: transformers' code with plain torch attention on a CPU, without CUDA graphs on a GPU",
    )
    batch_invariant: bool = Field(
        False, description="a request's logits equal in every bit whatever shares its steps; refused where it cannot be"
    )
    max_model_len: int | None = Field(
        None, ge=2, description="tokens of prompt + output; default: the model's own limit"
    )
    max_loaded_adapters: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="LoRA adapters in memory at once; the least recently used goes first; default: 8, on a GPU, where "
        "their memory is taken at the start, only of a model with `adapters`, else none",
    )
    simulated: dict[str, Any] | None = Field(
        None,
        description="for tests and benchmarks: the parameters of a cost model, `SimulatedCosts` in "
        "app/model/simulated.py, instead of weights; of `path`, the tokenizer and config.json are used",
    )

    @model_validator(mode="after")
    def _quantised_weights_are_for_one_decoder(self) -> ModelConfig:
        if self.quantization == "none":
            return self
        is_fp8 = self.quantization == "fp8"
        wrong = [
            f"{name} is {value}"
            for name, value, is_wrong in (
                ("device", self.device, self.device == ("cpu" if is_fp8 else "cuda")),
                ("dtype", self.dtype, is_fp8 and self.dtype == "float32"),
                ("backend", self.backend, self.backend != "auto"),
                ("simulated", "set", self.simulated is not None),
            )
            if is_wrong
        ]
        if wrong:
            raise ValueError(
                f"quantization is {self.quantization}, which only {self.quantised_by} computes, and "
                f"{' and '.join(wrong)}; set quantization: none, or leave those at their defaults"
            )
        return self

    @property
    def quantised_by(self) -> str:
        """What computes with the quantised weights that are asked for."""
        return "the decoder for CUDA" if self.quantization == "fp8" else "the native decoder on a CPU"


class CacheConfig(Settings):
    """The paged KV memory of one replica."""

    block_size: int = Field(16, ge=1, le=256, description="token slots in one block")
    memory_gib: float = Field(0.25, gt=0, description="KV memory on a CPU, GiB")
    gpu_memory_fraction: float = Field(
        0.9, gt=0, le=0.98, description="share of the GPU's memory for weights, step and KV"
    )
    dtype: KvType = Field(
        "auto",
        description="type of keys and values. auto: the model's. int8, fp8: with a scale for each token and KV head; "
        "int8 by native attention on a CPU, fp8 on a GPU of compute capability 8.9 or more, refused elsewhere",
    )
    num_blocks: int | None = Field(None, ge=1, description="exact number of blocks, instead of the memory settings")
    prefix_caching: bool = Field(True, description="share the KV of equal prompt prefixes between requests")


def _twice(names: Iterable[str]) -> list[str]:
    return sorted(name for name, number in Counter(names).items() if number > 1)


BatchSize = Annotated[int, Field(ge=1, le=4096, description="sequences in one batch; of adaptive, at most")]
MaxWaitMs = Annotated[float, Field(ge=0, le=600_000, description="ms after which a batch goes, full or not")]
Selective = Annotated[bool, Field(description="short sequences and chunks of long prompts never in one step")]


class StaticConfig(Settings):
    """No sequence joins until the whole batch has finished."""

    name: Literal["static"] = "static"
    batch_size: BatchSize = 8
    max_wait_ms: MaxWaitMs = 50.0


class DynamicConfig(Settings):
    """Static, with a bound on a batch's prompt tokens: a time window."""

    name: Literal["dynamic"] = "dynamic"
    batch_size: BatchSize = 8
    max_wait_ms: MaxWaitMs = 50.0
    max_batch_tokens: int = Field(4096, ge=1, le=10_000_000, description="prompt tokens of one batch, at most")


class BucketedConfig(Settings):
    """Only prompts of one length class share a batch."""

    name: Literal["bucketed"] = "bucketed"
    batch_size: BatchSize = 8
    max_wait_ms: MaxWaitMs = 50.0


class SortedConfig(Settings):
    """The request that has waited longest, with those of the nearest prompt lengths."""

    name: Literal["sorted"] = "sorted"
    batch_size: BatchSize = 8
    max_wait_ms: MaxWaitMs = 50.0


class AdaptiveConfig(Settings):
    """Dynamic, with a batch size that follows the latency of the batches before."""

    name: Literal["adaptive"] = "adaptive"
    batch_size: BatchSize = 32
    max_wait_ms: MaxWaitMs = 50.0
    target_latency_ms: float = Field(2000.0, gt=0, le=3_600_000, description="ms that a batch should take")


class ContinuousConfig(Settings):
    """At every step, as slots, blocks and the token budget allow."""

    name: Literal["continuous"] = "continuous"
    selective: Selective = False


class HybridConfig(Settings):
    """Continuous, with a share of the step's budget that prefill may take while anything decodes."""

    name: Literal["hybrid"] = "hybrid"
    selective: Selective = False
    prefill_share: float = Field(0.5, gt=0, le=1, description="share of a step's budget for prefill beside decoding")


StrategyConfig = (
    StaticConfig | DynamicConfig | BucketedConfig | SortedConfig | AdaptiveConfig | ContinuousConfig | HybridConfig
)


class FcfsConfig(Settings):
    """By arrival."""

    name: Literal["fcfs"] = "fcfs"


class SjfConfig(Settings):
    """The least estimated work first; waiting buys priority."""

    name: Literal["sjf"] = "sjf"


class PriorityConfig(Settings):
    """The lowest priority number first; ten seconds of waiting outweigh one class."""

    name: Literal["priority"] = "priority"
    preemption: bool = Field(True, description="a waiting request may take the slot of a running one of a lower class")


class FairConfig(Settings):
    """The tenant that has been served the fewest tokens first."""

    name: Literal["fair"] = "fair"


class DeadlineConfig(Settings):
    """Of each tenant the earliest deadline that can still be met first; between tenants as `fair`."""

    name: Literal["deadline"] = "deadline"


PolicyConfig = FcfsConfig | SjfConfig | PriorityConfig | FairConfig | DeadlineConfig


def _chosen(value: Any, kinds: Any, *, key: str = "name") -> Any:
    """A name alone stands for that kind with its defaults. Mistakes are answered with what there is."""
    given = {key: value} if isinstance(value, str) else value
    if not isinstance(given, dict):
        return value
    named: dict[str, type[BaseModel]] = {kind.model_fields[key].default: kind for kind in get_args(kinds)}
    kind = named.get(str(given.get(key)))
    if kind is None:
        got = f"got {given[key]!r}" if key in given else f"got {given!r} without a {key}"
        raise ValueError(f"{got}; must be one of {', '.join(named)}")
    unknown = [name for name in given if name not in kind.model_fields]
    if unknown:
        parameters = ", ".join(name for name in kind.model_fields if name != key) or "no parameters"
        raise ValueError(f"{given[key]} has no parameter {unknown[0]!r}; it has {parameters}")
    return given


Strategy = Annotated[
    StrategyConfig, Field(discriminator="name"), BeforeValidator(lambda value: _chosen(value, StrategyConfig))
]
Policy = Annotated[
    PolicyConfig, Field(discriminator="name"), BeforeValidator(lambda value: _chosen(value, PolicyConfig))
]


class TargetsConfig(Settings):
    """What an engine holds by moving its limits while it serves. At least one of them."""

    ttft_p99_s: float | None = Field(None, gt=0, le=3600, description="seconds to the first token, at most")
    itl_p99_ms: float | None = Field(None, gt=0, le=60_000, description="ms between two tokens of a request, at most")

    @model_validator(mode="after")
    def _there_is_one(self) -> TargetsConfig:
        if self.ttft_p99_s is None and self.itl_p99_ms is None:
            raise ValueError("there is no target: set ttft_p99_s, itl_p99_ms or both, or leave out targets")
        return self


Preset = Literal["latency", "throughput", "mixed", "batch"]
# What each preset sets where the config says nothing; for the rest there are the defaults. Measured on two cores of a
# CPU: docs/results/strategies.md.
PRESETS: dict[str, dict[str, Any]] = {
    "latency": {"max_running": 16, "max_waiting": 32, "max_step_tokens": 128, "prefill_chunk_tokens": 64},
    "throughput": {"max_running": 64, "max_waiting": 224},
    "mixed": {},
    "batch": {"max_running": 128, "max_waiting": 160, "max_step_tokens": 1024, "prefill_chunk_tokens": 512},
}


class SchedulerConfig(Settings):
    """Limits of a step and of the queue, and their order. A strategy or policy is a name, or a name with parameters."""

    preset: Preset = Field("mixed", description="values for what is not set here, see below")
    strategy: Strategy = Field(ContinuousConfig(), description="when waiting requests may join")
    policy: Policy = Field(FcfsConfig(), description="which waiting request goes first")
    max_running: int = Field(32, ge=1, le=4096, description="requests computed in one step, at most")
    max_waiting: int = Field(256, ge=0, le=1_000_000, description="requests queued on one replica, at most")
    max_step_tokens: int = Field(512, ge=1, le=1_000_000, description="token budget of one step")
    prefill_chunk_tokens: int = Field(256, ge=1, le=1_000_000, description="tokens of one prompt in one step, at most")
    targets: TargetsConfig | None = Field(
        None,
        description="99th percentiles that each engine holds by lowering max_step_tokens, prefill_chunk_tokens and "
        "max_running as far as needed; default: these stay as they are",
    )

    @property
    def max_requests(self) -> int:
        """Requests that one replica holds at once, running and waiting; background requests that yield do not count.

        Serve's own limits are derived from it.
        """
        return self.max_running + self.max_waiting

    @property
    def version(self) -> str:
        """The settings in a word: the names of preset, strategy and policy, and a hash of all values."""
        values = self.model_dump_json(exclude={"preset"}, exclude_none=True)  # the preset is only a name of these
        digest = hashlib.blake2b(values.encode(), digest_size=4).hexdigest()
        return f"{self.preset}-{self.strategy.name}-{self.policy.name}-{digest}"

    def changed(self, changes: Mapping[str, Any]) -> SchedulerConfig:
        """With other settings. What was set stays unless it is named; what a preset filled in follows another preset.

        Raises pydantic's ValidationError.
        """
        asked = {name: getattr(self, name) for name in self.model_fields_set}
        return SchedulerConfig.model_validate({**asked, **changes})

    @model_validator(mode="wrap")
    @classmethod
    def _preset_fills_in(cls, given: Any, validated: ModelWrapValidatorHandler[SchedulerConfig]) -> SchedulerConfig:
        if not isinstance(given, Mapping):
            return validated(given)
        config = validated({**PRESETS.get(str(given.get("preset")), {}), **given})
        config.model_fields_set.intersection_update(given)  # what was asked, for `changed`
        return config

    @model_validator(mode="after")
    def _every_running_request_gets_a_token(self) -> SchedulerConfig:
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens={self.max_step_tokens} is below max_running={self.max_running}: "
                f"every running request needs one token a step; raise max_step_tokens or lower max_running"
            )
        return self


class StepLogConfig(Settings):
    """The record of every step's decisions, for `python -m benchmarks.engine.replay`. Off unless it has a path."""

    path: str | None = Field(
        None, min_length=1, description="folder for the record of every step; default: none is kept"
    )
    record_prompts: bool = Field(
        True, description="prompts and outputs as token ids; else lengths and hashes, for replays without a model"
    )
    max_megabytes: int = Field(
        1024, ge=16, le=1_000_000, description="MB of the records in that folder, at most; the oldest files are deleted"
    )


class SpeculationConfig(Settings):
    """Drafts of the next tokens, computed in one step and kept where they are what would be drawn."""

    method: Literal["lookup", "draft_model", "off"] = Field(
        "off",
        description="lookup: what followed the same tokens before, and what grammars force; draft_model: what a "
        "smaller model draws; both on CPUs only",
    )
    model: str | None = Field(
        None,
        min_length=1,
        description="folder, GGUF file or hub id of the draft model, which has the same tokens; its type, quantization "
        "and threads are the model's",
    )
    max_drafts: int = Field(8, ge=1, le=64, description="drafts for one request in one step, at most")

    @model_validator(mode="after")
    def _a_draft_model_is_named(self) -> SpeculationConfig:
        if (self.method == "draft_model") != (self.model is not None):
            raise ValueError(
                f"method is {self.method} and model is {self.model}: method: draft_model needs a model, and no other "
                f"method has one"
            )
        return self


class EngineConfig(Settings):
    """Everything one engine needs."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    step_log: StepLogConfig = StepLogConfig()

    @property
    def model_paths(self) -> dict[str, str]:
        """The folders, files or hub ids of all its models, by setting."""
        draft = self.speculation.model
        return {"model.path": self.model.path} | ({} if draft is None else {"speculation.model": draft})


class GroupConfig(Settings):
    """One arm of an A/B trial: a share of the requests, and replicas of its own with settings of their own."""

    name: Name = Field("a", description="what a caller may ask for in the header `x-carousel-group`")
    share: float = Field(1.0, gt=0, le=1e6, description="of the requests and replicas, as a weight among the groups")
    scheduler: dict[str, Any] = Field({}, description="settings that differ from `engine.scheduler`")


class AutoscalingConfig(Settings):
    """How many replicas there are, by the work that is outstanding and the KV memory in use."""

    min_replicas: int = Field(1, ge=0, le=1024, description="as few at least; 0: none while there is nothing to do")
    max_replicas: int = Field(4, ge=1, le=1024, description="as many at most")
    target_tokens: int = Field(
        8192,
        ge=1,
        le=10**12,
        description="tokens still to compute that one replica should have, of prompts and outputs",
    )
    downscale_delay_s: float = Field(
        120.0, ge=0, le=86_400, description="seconds of too little load before there are fewer"
    )
    scale_to_zero_after_s: float = Field(
        600.0, ge=0, le=86_400, description="seconds without any request before the last replica goes"
    )

    @model_validator(mode="after")
    def _limits_agree(self) -> AutoscalingConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas={self.min_replicas} is above max_replicas={self.max_replicas}")
        return self


class ReplicasConfig(Settings):
    """How many copies of one engine run, on what, and how requests are spread over them."""

    num_replicas: int = Field(2, ge=1, le=1024, description="engines serving this model; with autoscaling, at first")
    autoscaling: AutoscalingConfig | None = Field(
        None, description="their number follows the load; default: it is fixed"
    )
    num_cpus: float = Field(0.5, gt=0, description="CPUs Ray reserves for each")
    num_gpus: float = Field(0, ge=0, description="GPUs Ray reserves for each")
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="devices that compute each step of one replica together; Ray reserves as much for each",
    )
    dispatch: Literal["round_robin", "least_loaded", "prefix_affinity"] = Field(
        "least_loaded",
        description="how a replica is chosen: each in its turn, the one that would be done first by its outstanding "
        "tokens and speed, or the one with the longest cached beginning of the prompt while its load is near the least",
    )
    groups: tuple[GroupConfig, ...] = Field((), max_length=64, description="arms of an A/B trial")
    drain_timeout_s: float = Field(120.0, gt=0, description="seconds a stopping replica may finish what it has")
    silence_timeout_s: float = Field(
        3.0, ge=0.2, le=3600, description="seconds without a sign of life after which a replica counts as lost"
    )
    step_timeout_s: float = Field(
        60.0, gt=0, le=86_400, description="seconds one step may take before its replica counts as hung"
    )
    place_timeout_s: float = Field(
        30.0, gt=0, le=86_400, description="seconds a request waits for a replica while there is none"
    )
    sleep_after_s: float | None = Field(
        None,
        ge=0,
        le=86_400,
        description="seconds without a request after which a replica gives up the memory of its weights and KV, until "
        "the next request; default: it keeps them",
    )
    device_memory_gib: float | None = Field(
        None,
        gt=0,
        description="GiB that the replicas with `sleep_after_s` on one GPU, or on the CPUs of one machine, may have "
        "together; those that do not fit take turns; default: 90% of what there is",
    )

    @model_validator(mode="after")
    def _every_group_gets_a_replica(self) -> ReplicasConfig:
        twice = _twice(group.name for group in self.groups)
        if twice:
            raise ValueError(f"groups have the same name: {', '.join(twice)}; give each its own")
        if len(self.groups) > self.num_replicas:
            raise ValueError(
                f"{len(self.groups)} groups and num_replicas={self.num_replicas}: every group needs a replica; "
                f"raise num_replicas or remove groups"
            )
        return self

    @model_validator(mode="after")
    def _what_sleeps_is_whole(self) -> ReplicasConfig:
        if self.sleep_after_s is not None and self.tensor_parallel > 1:
            raise ValueError(
                f"sleep_after_s={self.sleep_after_s:g} and tensor_parallel={self.tensor_parallel}: the ranks of a "
                f"replica do not sleep; remove one of the two"
            )
        if self.device_memory_gib is not None and self.sleep_after_s is None:
            raise ValueError(
                f"device_memory_gib={self.device_memory_gib:g} is for replicas that sleep: set sleep_after_s too"
            )
        return self

    @property
    def reserved_cpus(self) -> float:
        """What Ray reserves for one replica."""
        return self.num_cpus * self.tensor_parallel

    @property
    def reserved_gpus(self) -> float:
        """What Ray reserves for one replica."""
        return self.num_gpus * self.tensor_parallel

    @property
    def gpu_share(self) -> float:
        """The part of a GPU's memory that is one replica's: two with `num_gpus: 0.5` have half a card each."""
        return min(1.0, self.num_gpus or 1.0)

    @property
    def max_replicas(self) -> int:
        """As many as there can ever be."""
        return self.autoscaling.max_replicas if self.autoscaling else self.num_replicas

    @property
    def initial_replicas(self) -> int:
        """As many as there are at first: at least one, for the ingress asks it what the model allows."""
        if self.autoscaling is None:
            return self.num_replicas
        return min(max(self.num_replicas, self.autoscaling.min_replicas), self.autoscaling.max_replicas)

    @property
    def may_sleep(self) -> bool:
        """Whether there may be none while there is nothing to do."""
        return self.autoscaling is not None and self.autoscaling.min_replicas == 0


class ServedModelConfig(Settings):
    """One model of the application: the name clients use, its engine and its replicas."""

    name: Name = Field("demo", description="what a client sends as `model`")
    aliases: tuple[Name, ...] = Field((), max_length=64, description="other names under which it is served")
    tool_parser: Literal["auto", "none", "hermes", "llama3", "mistral"] = Field(
        "auto", description="how the model writes tool calls; auto: as its chat template does, if that is one of these"
    )
    pooling: Literal["auto", "last", "mean", "cls", "none"] = Field(
        "auto",
        description="embeddings: the last token's hidden state, the mean of all tokens', an encoder's first, or none "
        "are given; auto: as 1_Pooling/config.json says, else last, and mean of an encoder",
    )
    deadline_s: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="seconds that a request may take which names no `deadline_s`, waiting included; not of background "
        "requests; default: any number",
    )
    adapters: dict[Name, str] = Field(
        {}, max_length=1024, description="LoRA adapters by the name that clients send as `model`: a folder or a hub id"
    )
    engine: EngineConfig = EngineConfig()
    replicas: ReplicasConfig = ReplicasConfig()

    @property
    def engine_with_adapters(self) -> EngineConfig:
        """The engine's settings; where adapters are configured, so is how many are in memory at once."""
        model = self.engine.model
        if not self.adapters or model.max_loaded_adapters is not None:
            return self.engine
        model = model.model_copy(update={"max_loaded_adapters": MAX_LOADED_ADAPTERS})
        return self.engine.model_copy(update={"model": model})

    def scheduler_of(self, group: str) -> SchedulerConfig:
        """The scheduler's settings on the replicas of a group; the engine's for "" and for a group there is not."""
        changes = next((each.scheduler for each in self.replicas.groups if each.name == group), {})
        return self.engine.scheduler.changed(changes)

    @model_validator(mode="after")
    def _groups_can_be_scheduled(self) -> ServedModelConfig:
        max_requests = self.engine.scheduler.max_requests
        for index, group in enumerate(self.replicas.groups):
            where = f"replicas.groups[{index}].scheduler"
            try:
                scheduler = self.scheduler_of(group.name)
            except ValidationError as error:
                raise ValueError(f"{where}: {_in_words(error)}") from error
            if scheduler.max_requests > max_requests:
                raise ValueError(
                    f"{where}: max_running + max_waiting is {scheduler.max_requests:,}; the model's replicas take "
                    f"{max_requests:,} by engine.scheduler: raise it there"
                )
        return self


class KeyConfig(Settings):
    """An API key, of which only a hash is known, and what its holder may do."""

    name: Name = Field(description="name of the key: the tenant of its requests")
    sha256: str = Field(description="hash of the key, as `carousel key` prints it")
    models: tuple[Name, ...] = Field((), description="models it may use; none named: all")
    requests_per_minute: int | None = Field(None, ge=1, le=10**9, description="requests a minute; default: any number")
    tokens_per_minute: int | None = Field(
        None, ge=1, le=10**12, description="tokens of prompts and outputs a minute; default: any number"
    )
    max_concurrency: int | None = Field(
        None, ge=1, le=10**6, description="requests at once; default: as many as places are free"
    )
    max_tokens: int | None = Field(None, ge=1, le=10**9, description="output tokens of a choice; default: the model's")
    min_priority: int = Field(
        0, ge=-100, le=0, description="lowest `priority` that it may ask for: below 0 it may go before other keys"
    )
    admin: bool = Field(False, description="it opens the routes under /admin too")

    @field_validator("sha256")
    @classmethod
    def _is_a_hash(cls, sha256: str) -> str:
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):  # it may be the key itself, which no message should show
            raise ValueError(
                f"sha256 has {len(sha256):,} characters; it should be the 64 hexadecimal digits of the key's hash, as "
                f"`carousel key` prints them"
            )
        return sha256


class ApiConfig(Settings):
    """Which keys may use the HTTP API, and what they share."""

    keys: tuple[KeyConfig, ...] = Field(
        (), description="API keys; without any here and in `keys_file`, requests need none"
    )
    keys_file: str | None = Field(
        None, min_length=1, description="YAML file with a list of such keys, followed while the service runs"
    )
    allow_unauthenticated: bool = Field(
        False,
        description="without keys, listen on other interfaces than loopback: any machine that reaches it may use it",
    )
    metrics_for: Literal["public", "keys", "admins"] = Field(
        "keys",
        description="which requests may read /metrics: all, those with a key, or those with a key that has `admin`",
    )
    allowed_origins: tuple[str, ...] = Field(
        (),
        max_length=64,
        description="web pages that may use the API, by their origins, as https://chat.example.com (CORS); `*`: all",
    )
    share_prefixes: bool = Field(
        False, description="cached prefixes serve all keys: faster, but times tell one what another has sent"
    )

    @field_validator("allowed_origins")
    @classmethod
    def _origins_are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in map(str.lower, origins):
            if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
                raise ValueError(
                    f"got {origin!r}; an origin is written as browsers send it: https://chat.example.com or "
                    f"http://localhost:3000, without a path; `*` allows all"
                )
        return tuple(map(str.lower, origins))

    @field_validator("keys")
    @classmethod
    def _keys_are_told_apart(cls, keys: tuple[KeyConfig, ...]) -> tuple[KeyConfig, ...]:
        for what, values in (("name", [key.name for key in keys]), ("sha256", [key.sha256 for key in keys])):
            twice = _twice(values)
            if twice:
                raise ValueError(f"keys have the same {what}: {', '.join(twice)}; give each its own")
        return keys


class IngressConfig(Settings):
    """The HTTP side."""

    num_replicas: int = Field(1, ge=1, le=256, description="ingress processes")


class WebhooksConfig(Settings):
    """Messages about the end of a batch: their default receiver, and which receivers are allowed."""

    url: str | None = Field(
        None,
        min_length=1,
        max_length=2048,
        description="webhooks: told of every batch that names no webhook of its own; may be in a private network, "
        "over http and on any port",
    )
    secret_file: str | None = Field(
        None, min_length=1, description="webhooks: file with the secret (`whsec_…`) that signs what goes to that url"
    )
    allowed_networks: tuple[str, ...] = Field(
        (),
        max_length=64,
        description="webhooks: networks, as 10.1.0.0/16, in which receivers that batches name are allowed too, over "
        "http and on any port: every key may have messages sent there",
    )

    @field_validator("allowed_networks")
    @classmethod
    def _networks_are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(f"{error}; give networks like 10.1.0.0/16 or fd00:1::/32") from None
        return networks

    @model_validator(mode="after")
    def _url_and_secret_go_together(self) -> WebhooksConfig:
        if (self.url is None) != (self.secret_file is None):
            raise ValueError("url and secret_file go together: set both or neither")
        return self


class BatchesConfig(Settings):
    """Files and batches over HTTP: where they are kept, what they may cost."""

    path: str = Field(
        "~/.local/share/carousel/batches",
        min_length=1,
        description="batches: folder that keeps files and batches over restarts; one service each",
    )
    files: str | None = Field(
        None, min_length=1, description="batches: URL that fsspec opens, for the files' contents; default: in `path`"
    )
    max_total_bytes: int = Field(
        20 * GIB, ge=1, le=10**15, description="batches: bytes of all files, beyond which none is taken"
    )
    max_in_flight: int = Field(32, ge=1, le=10_000, description="batches: items sent to the replicas at once")
    keep_s: int | None = Field(
        30 * 86_400, ge=1, description="batches: seconds a file is kept if its owner says nothing; null: for ever"
    )
    engines: int = Field(
        0,
        ge=0,
        le=1000,
        description="batches: engines of its own that a batch gets, beside the replicas; 0: the replicas compute its "
        "items, in the lowest class",
    )
    webhooks: WebhooksConfig = WebhooksConfig()


class RerankStepConfig(Settings):
    """Keeps the best documents by the scores of `/v1/rerank`."""

    kind: Literal["rerank"] = "rerank"
    model: Name = Field(description="a model with embeddings or a cross-encoder")
    top_n: int = Field(4, ge=1, le=1000, description="documents that are kept, at most")


class EmbedStepConfig(Settings):
    """Keeps the best documents by the cosines of embeddings, of the request or of an index."""

    kind: Literal["embed"] = "embed"
    model: Name = Field(description="a model with embeddings")
    top_n: int = Field(4, ge=1, le=1000, description="documents that are kept, at most")
    index: str | None = Field(
        None,
        min_length=1,
        description="file of documents, a JSON object with `text` and, if it has one, `id` in each line; default: the "
        "documents of the request",
    )


class GenerateStepConfig(Settings):
    """A model answers."""

    kind: Literal["generate"] = "generate"
    model: Name = Field(description="the model, or another pipeline, that answers")


class CascadeStepConfig(Settings):
    """A small model answers where it was sure, else a large one."""

    kind: Literal["cascade"] = "cascade"
    small: Name = Field(description="the model or pipeline that answers first")
    large: Name = Field(description="the one that answers when it was not sure")
    min_mean_logprob: float = Field(
        -1.0, ge=-100, le=0, description="mean log-probability of the small one's tokens from which on it was sure"
    )

    @model_validator(mode="after")
    def _there_are_two(self) -> CascadeStepConfig:
        if self.small == self.large:
            raise ValueError(f"small and large are both {self.small!r}; name two")
        return self


class EnsembleStepConfig(Settings):
    """Several models answer, and one of their answers is chosen."""

    kind: Literal["ensemble"] = "ensemble"
    models: tuple[Name, ...] = Field(min_length=2, max_length=16, description="models or pipelines that answer")
    choose: Literal["vote", "logprob"] = Field(
        "vote",
        description="vote: the text that most of them give, of several the likeliest; logprob: the answer with the "
        "highest mean log-probability of its tokens",
    )


class RouteCaseConfig(Settings):
    """One way of a route, and which requests take it: those that no case before it takes."""

    model: Name = Field(description="the model or pipeline that answers")
    preset: Preset | None = Field(None, description="of the groups of its replicas that may get the request")
    max_prompt_tokens: int | None = Field(None, ge=1, description="by length: prompts of up to so many tokens")
    values: tuple[str, ...] = Field(
        (), max_length=256, description="by header: its values; by classifier: labels of the model, instead of examples"
    )
    examples: tuple[str, ...] = Field((), max_length=64, description="by classifier: texts of this kind")


class RouteStepConfig(Settings):
    """The first case that a request fits says which model answers, before anything of the answer is queued."""

    kind: Literal["route"] = "route"
    by: Literal["length", "header", "classifier"] = Field(
        description="the length of the prompt, a header of the request, or what its last text is: the example that it "
        "is nearest to, or the label that a model gives it"
    )
    header: str | None = Field(None, pattern=r"^[a-z0-9-]+$", description="by header: its name, in lower case")
    classifier: Name | None = Field(None, description="by classifier: a model with embeddings, or one with labels")
    cases: tuple[RouteCaseConfig, ...] = Field(
        min_length=2, max_length=64, description="in their order; but with examples, the last is for all others"
    )

    @property
    def has_labels(self) -> bool:
        """Whether its classifier gives labels, which the cases name; else they have examples."""
        return self.classifier is not None and bool(self.cases[0].values)

    @model_validator(mode="after")
    def _cases_are_told_apart(self) -> RouteStepConfig:
        condition = {"length": "max_prompt_tokens", "header": "values", "classifier": "examples"}[self.by]
        if self.has_labels:
            condition = "values"
        for name in ("header", "classifier"):
            if (getattr(self, name) is None) == (self.by == name):
                raise ValueError(f"{name} is for a route by {name}, which needs it, and this one is by {self.by}")
        for index, case in enumerate(self.cases):
            is_for_others = index == len(self.cases) - 1 and condition != "examples"
            given = [name for name in ("max_prompt_tokens", "values", "examples") if getattr(case, name)]
            wanted = [] if is_for_others else [condition]
            if given != wanted:
                raise ValueError(
                    f"cases[{index}] has {', '.join(given) or 'no condition'}; of a route by {self.by} it "
                    f"{'is for all others and has none' if is_for_others else f'has {condition}'}"
                )
        return self


RankingStepConfig = RerankStepConfig | EmbedStepConfig
AnsweringStepConfig = GenerateStepConfig | CascadeStepConfig | EnsembleStepConfig | RouteStepConfig
PipelineStepConfig = RankingStepConfig | AnsweringStepConfig
PipelineStep = Annotated[
    PipelineStepConfig,
    Field(discriminator="kind"),
    BeforeValidator(lambda value: _chosen(value, PipelineStepConfig, key="kind")),
]


class PipelineConfig(Settings):
    """Steps under one more name: the last one answers, those before it choose what the answer is based on."""

    name: Name = Field(description="what a client sends as `model`")
    steps: tuple[PipelineStep, ...] = Field(min_length=1, max_length=16, description="in the order in which they run")

    @model_validator(mode="after")
    def _the_last_step_answers(self) -> PipelineConfig:
        *earlier, last = self.steps
        for index, step in enumerate(earlier):
            if index and isinstance(step, EmbedStepConfig) and step.index is not None:
                raise ValueError(f"steps[{index}]: an index is for the first step: it replaces the documents before it")
            if isinstance(step, AnsweringStepConfig):
                raise ValueError(
                    f"steps[{index}]: {step.kind} answers, so no step comes behind it; make it the last, or name this "
                    f"pipeline in a step of another"
                )
        if not isinstance(last, AnsweringStepConfig):
            raise ValueError(
                f"steps[{len(earlier)}]: {last.kind} is the last step and does not answer; add a step behind it, such "
                f"as {{kind: generate, model: ...}}"
            )
        return self


class ApplicationConfig(Settings):
    """The `args` of the Serve application: what `deployments/serve.yaml` holds."""

    models: tuple[ServedModelConfig, ...] = Field((ServedModelConfig(),), min_length=1, description="models to serve")
    api: ApiConfig = ApiConfig()
    ingress: IngressConfig = IngressConfig()
    pipelines: tuple[PipelineConfig, ...] = Field((), max_length=64, description="several steps under one name")
    batches: BatchesConfig | None = Field(
        None, description="files, batches and /v1/batch; `{}` takes the defaults below"
    )

    @model_validator(mode="before")
    @classmethod
    def _cascades_are_pipelines(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and "cascades" in given:
            raise ValueError(
                "cascades: a cascade is a step of a pipeline now; write pipelines: [{name: ..., steps: [{kind: "
                "cascade, small: ..., large: ..., min_mean_logprob: ...}]}]"
            )
        return given

    @model_validator(mode="after")
    def _names_are_unique(self) -> ApplicationConfig:
        names = [name for model in self.models for name in (model.name, *model.aliases, *model.adapters)]
        twice = _twice([*names, *(pipeline.name for pipeline in self.pipelines)])
        if twice:
            raise ValueError(
                f"models, adapters and pipelines have the same name: {', '.join(twice)}; give each its own"
            )
        return self

    @model_validator(mode="after")
    def _pipelines_name_what_there_is(self) -> ApplicationConfig:
        models = self._models_by_any_name()
        pipelines = {pipeline.name: pipeline for pipeline in self.pipelines}
        for index, pipeline in enumerate(self.pipelines):
            for place, step in enumerate(pipeline.steps):
                for field, name, answers in named_by(step):
                    known = [*models, *(pipelines if answers else ())]
                    if name not in known:
                        what = "model or pipeline" if answers else "model"
                        raise ValueError(
                            f"pipelines[{index}].steps[{place}].{field}: there is no {what} {name!r}; there are "
                            f"{', '.join(known)}"
                        )
                if isinstance(step, RouteStepConfig):
                    self._check_presets(step, f"pipelines[{index}].steps[{place}]")
        sound: set[str] = set()
        for index, name in enumerate(pipelines):
            circle = _circle(name, pipelines, sound)
            if circle:
                raise ValueError(
                    f"pipelines[{index}]: it would answer itself: {' → '.join(circle)}; name a model in one of them"
                )
        return self

    def _models_by_any_name(self) -> dict[str, ServedModelConfig]:
        """Each model under its name, its aliases and the names of its adapters."""
        return {name: model for model in self.models for name in (model.name, *model.aliases, *model.adapters)}

    def _check_presets(self, route: RouteStepConfig, path: str) -> None:
        models = self._models_by_any_name()
        for index, case in enumerate(route.cases):
            if case.preset is None:
                continue
            where = f"{path}.cases[{index}].preset"
            if case.model not in models:
                raise ValueError(f"{where}: {case.model} is a pipeline; a preset is for the replicas of a model")
            model = models[case.model]
            presets = {model.scheduler_of(group.name).preset for group in model.replicas.groups}
            if case.preset not in presets:
                raise ValueError(
                    f"{where}: got {case.preset!r}; the groups of {case.model} have "
                    f"{', '.join(sorted(presets)) or 'no preset, as there are none'}"
                )


class NamedByStep(NamedTuple):
    """A model, by its name, an alias or an adapter, or a pipeline that a step runs."""

    field: str  # that names it
    name: str
    answers: bool  # else it ranks or classifies, which only models do


def named_by(step: PipelineStepConfig) -> list[NamedByStep]:
    """The models and pipelines that a step runs."""
    match step:
        case CascadeStepConfig():
            return [NamedByStep("small", step.small, True), NamedByStep("large", step.large, True)]
        case EnsembleStepConfig():
            return [NamedByStep(f"models[{index}]", name, True) for index, name in enumerate(step.models)]
        case RouteStepConfig():
            asked = [] if step.classifier is None else [NamedByStep("classifier", step.classifier, False)]
            cases = enumerate(step.cases)
            return asked + [NamedByStep(f"cases[{index}].model", case.model, True) for index, case in cases]
        case _:
            return [NamedByStep("model", step.model, isinstance(step, AnsweringStepConfig))]


def _circle(
    name: str, pipelines: Mapping[str, PipelineConfig], sound: set[str], before: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """The names on a way from a pipeline back to one before it; none where there is no such way.

    `sound`: pipelines without such a way, which are not walked again; those that are found join them.
    """
    if name in before:
        return (*before, name)
    if name not in sound:
        for inner in named_by(pipelines[name].steps[-1]):
            if inner.name in pipelines and (circle := _circle(inner.name, pipelines, sound, (*before, name))):
                return circle
        sound.add(name)
    return ()


def _in_words(error: ValidationError) -> str:
    """The first mistake, with its place and the value."""
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"]))
    if first["type"] == "value_error":
        text = first["msg"].removeprefix("Value error, ")
    elif first["type"] == "extra_forbidden":
        text = f"no such setting; there are {', '.join(SchedulerConfig.model_fields)}"
    else:
        text = f"got {first['input']!r}; {first['msg']}"
    return f"{where}: {text}" if where else text


def leaves(branch: type[BaseModel], path: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting below a branch of the tree, by its dotted path; `[]` marks a list of branches.

    Where there is a choice of branches, the choice itself is a setting and below it are the parameters of all kinds. So
    is a branch that may be left out.
    """
    for name, field in branch.model_fields.items():
        inner = branches_of(field)
        below = f"{path}{name}{'[]' if inner and get_origin(field.annotation) is tuple else ''}"
        if len(inner) != 1 or field.default is None:
            yield below, field
        if len(inner) == 1:
            yield from leaves(inner[0], f"{below}.")
        elif inner:
            parameters = {key: value for kind in inner for key, value in parameters_of(kind).items()}
            yield from ((f"{below}.{key}", value) for key, value in parameters.items())
            for key, value in parameters.items():
                for branch_below in branches_of(value):
                    yield from leaves(branch_below, f"{below}.{key}[].")


def branches_of(field: FieldInfo) -> tuple[type[BaseModel], ...]:
    """The branches a setting may hold: none for a plain value, several where there is a choice by name or kind."""

    return tuple(branches_within(field.annotation))


def branches_within(annotation: Any) -> Iterator[type[BaseModel]]:
    """The branches that an annotation names."""
    if get_origin(annotation) in (tuple, Union, UnionType):
        for inner in get_args(annotation):
            yield from branches_within(inner)
    elif get_origin(annotation) is Annotated:
        yield from branches_within(get_args(annotation)[0])
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation


def choice_of(kind: type[BaseModel]) -> str:
    """What a branch is called where it is one of several."""
    return str(kind.model_fields[_choice_key(kind)].default)


def parameters_of(kind: type[BaseModel]) -> dict[str, FieldInfo]:
    """The settings of a branch that is one of several."""
    return {name: field for name, field in kind.model_fields.items() if name != _choice_key(kind)}


def _choice_key(kind: type[BaseModel]) -> str:
    return "kind" if "kind" in kind.model_fields else "name"


def names_of(field: FieldInfo) -> tuple[str, ...]:
    """What may be chosen by name or kind where a setting holds one of several branches."""
    kinds = branches_of(field)
    return tuple(map(choice_of, kinds)) if len(kinds) > 1 else ()
