"""The settings of a scheduler: limits, strategies, policies and the presets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, field_validator, model_validator

from app.config.base import Settings, chosen
from app.config.removed import refuse_removed


class WholeBatchesConfig(Settings):
    """What the strategies have in common that form batches."""

    batch_size: int = Field(8, ge=1, le=4096, description="sequences in one batch; of adaptive, at most")
    max_wait_ms: float = Field(50.0, ge=0, le=600_000, description="ms after which a batch goes, full or not")


class StaticConfig(WholeBatchesConfig):
    """No sequence joins until the whole batch has finished."""

    name: Literal["static"] = "static"


class DynamicConfig(WholeBatchesConfig):
    """Static, with a bound on a batch's prompt tokens: a time window."""

    name: Literal["dynamic"] = "dynamic"
    max_batch_tokens: int = Field(4096, ge=1, le=10_000_000, description="prompt tokens of one batch, at most")


class BucketedConfig(WholeBatchesConfig):
    """Only prompts of one length class share a batch: selective batching by length."""

    name: Literal["bucketed"] = "bucketed"
    # Each class holds prompts of up to twice the length of the one before, so that a batch takes at most twice as long
    # as its shortest prompt needs.
    bounds: tuple[Annotated[int, Field(ge=1, le=10_000_000)], ...] = Field(
        (64, 128, 256, 512, 1024, 2048),
        min_length=1,
        max_length=64,
        description="tokens of the longest prompt of each length class, rising; longer prompts are one class more",
    )

    @field_validator("bounds")
    @classmethod
    def _bounds_rise(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        for shorter, longer in pairwise(value):
            if longer <= shorter:
                raise ValueError(f"{longer} follows {shorter}; each bound must be larger than the one before")
        return value


class SortedConfig(WholeBatchesConfig):
    """The request that has waited longest, with those of the nearest prompt lengths."""

    name: Literal["sorted"] = "sorted"


class AdaptiveConfig(WholeBatchesConfig):
    """Dynamic, with a batch size that follows the latency of the batches before."""

    name: Literal["adaptive"] = "adaptive"
    batch_size: int = Field(32, ge=1, le=4096, description="sequences in one batch; of adaptive, at most")
    target_latency_ms: float = Field(2000.0, gt=0, le=3_600_000, description="ms that a batch should take")


class ContinuousConfig(Settings):
    """At every step, as slots, blocks and the token budget allow."""

    name: Literal["continuous"] = "continuous"


class HybridConfig(Settings):
    """Continuous, with a share of the step's budget that prefill may take while anything decodes."""

    name: Literal["hybrid"] = "hybrid"
    prefill_share: float = Field(0.5, gt=0, le=1, description="share of a step for prefill while anything decodes")


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


class FairConfig(Settings):
    """The tenant that has been served the fewest tokens first."""

    name: Literal["fair"] = "fair"


class DeadlineConfig(Settings):
    """Of each tenant the earliest deadline that can still be met first; between tenants as `fair`."""

    name: Literal["deadline"] = "deadline"


PolicyConfig = FcfsConfig | SjfConfig | PriorityConfig | FairConfig | DeadlineConfig


Strategy = Annotated[
    StrategyConfig, Field(discriminator="name"), BeforeValidator(lambda value: chosen(value, StrategyConfig))
]
Policy = Annotated[
    PolicyConfig, Field(discriminator="name"), BeforeValidator(lambda value: chosen(value, PolicyConfig))
]


class TargetsConfig(Settings):
    """At least one of them."""

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
    """Limits of a step and of the queue, and their order."""

    preset: Preset = Field("mixed", description="values for what is not set here")
    strategy: Strategy = Field(ContinuousConfig(), description="when waiting requests may join")
    policy: Policy = Field(
        FcfsConfig(),
        description="which waiting request goes first; under priority, ten seconds of waiting outweigh one class",
    )
    max_running: int = Field(32, ge=1, le=4096, description="requests in one step, at most")
    max_waiting: int = Field(256, ge=0, le=1_000_000, description="requests queued on one replica, at most")
    max_step_tokens: int = Field(
        512, ge=1, le=1_000_000, description="token budget of one step; if not set, at least max_running"
    )
    prefill_chunk_tokens: int = Field(256, ge=1, le=1_000_000, description="tokens of one prompt in one step, at most")
    targets: TargetsConfig | None = Field(
        None,
        description="99th percentiles to hold by lowering max_step_tokens, prefill_chunk_tokens and max_running",
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
        refuse_removed(given, within="models[].engine.scheduler")
        filled = {**PRESETS.get(str(given.get("preset")), {}), **given}
        config = validated(filled)
        if "max_step_tokens" not in given and config.max_step_tokens < config.max_running:
            config = validated(filled | {"max_step_tokens": config.max_running})
        config.model_fields_set.intersection_update(given)  # what was asked, for `changed`
        if config.max_step_tokens < config.max_running:
            by_preset = "" if "max_running" in given else f", which preset {config.preset} sets"
            raise ValueError(
                f"max_step_tokens={config.max_step_tokens} is below max_running={config.max_running}{by_preset}: "
                f"every running request needs one token a step; raise max_step_tokens or lower max_running"
            )
        return config
