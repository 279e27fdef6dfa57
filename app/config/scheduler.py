"""The settings of a scheduler: limits, strategies, policies and the presets."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ModelWrapValidatorHandler, model_validator

from app.config.base import Settings, chosen
from app.config.removed import without_removed


class WholeBatchesConfig(Settings):
    """Base class of the strategies that form whole batches of at most `max_running` sequences."""

    max_wait_ms: float = Field(50.0, ge=0, le=600_000, description="ms after which a batch starts even if not full")


class StaticConfig(WholeBatchesConfig):
    """No sequence joins until the whole batch has finished."""

    name: Literal["static"] = "static"


class DynamicConfig(WholeBatchesConfig):
    """Like static, with a limit on the prompt tokens in one batch."""

    name: Literal["dynamic"] = "dynamic"


class BucketedConfig(WholeBatchesConfig):
    """Selective batching by length: only prompts of one length class share a batch."""

    name: Literal["bucketed"] = "bucketed"


class SortedConfig(WholeBatchesConfig):
    """A batch contains the request that has waited longest and the requests with the most similar prompt lengths."""

    name: Literal["sorted"] = "sorted"


class AdaptiveConfig(WholeBatchesConfig):
    """Like dynamic, with a batch size that adapts to the latency of earlier batches."""

    name: Literal["adaptive"] = "adaptive"
    target_latency_ms: float = Field(2000.0, gt=0, le=3_600_000, description="target latency of a batch in ms")


class ContinuousConfig(Settings):
    """Requests join at every step if slots, blocks and the token budget allow."""

    name: Literal["continuous"] = "continuous"


class HybridConfig(Settings):
    """Like continuous, with a limit on prefill's share of a step's token budget while a sequence decodes."""

    name: Literal["hybrid"] = "hybrid"
    prefill_share: float = Field(0.5, gt=0, le=1, description="maximum share of a step for prefill during decode")


StrategyConfig = (
    StaticConfig | DynamicConfig | BucketedConfig | SortedConfig | AdaptiveConfig | ContinuousConfig | HybridConfig
)


class FcfsConfig(Settings):
    """The oldest request first."""

    name: Literal["fcfs"] = "fcfs"


class SjfConfig(Settings):
    """The request with the least estimated work first; waiting raises a request's priority."""

    name: Literal["sjf"] = "sjf"


class PriorityConfig(Settings):
    """The lowest priority number first; ten seconds of waiting outweigh one priority class."""

    name: Literal["priority"] = "priority"


class FairConfig(Settings):
    """The tenant with the fewest served tokens first."""

    name: Literal["fair"] = "fair"


class DeadlineConfig(Settings):
    """Within a tenant, the earliest deadline that can still be met first; between tenants like `fair`."""

    name: Literal["deadline"] = "deadline"


PolicyConfig = FcfsConfig | SjfConfig | PriorityConfig | FairConfig | DeadlineConfig


Strategy = Annotated[
    StrategyConfig, Field(discriminator="name"), BeforeValidator(lambda value: chosen(value, StrategyConfig))
]
Policy = Annotated[
    PolicyConfig, Field(discriminator="name"), BeforeValidator(lambda value: chosen(value, PolicyConfig))
]


class TargetsConfig(Settings):
    """99th percentiles to meet by lowering max_step_tokens, prefill_chunk_tokens and max_running; default: none."""

    ttft_p99_s: float | None = Field(None, gt=0, le=3600, description="maximum seconds to the first token")
    itl_p99_ms: float | None = Field(None, gt=0, le=60_000, description="maximum ms between two tokens of a request")

    def __bool__(self) -> bool:
        """Whether any target is set."""
        return self.ttft_p99_s is not None or self.itl_p99_ms is not None


Preset = Literal["latency", "throughput", "mixed", "batch"]
# The values that each preset sets for settings that a config omits; other settings have their defaults. The values were
# measured on two CPU cores, see docs/results/planning.md.
PRESETS: dict[str, dict[str, Any]] = {
    "latency": {"max_running": 16, "max_waiting": 32, "max_step_tokens": 128, "prefill_chunk_tokens": 64},
    "throughput": {"max_running": 64, "max_waiting": 224},
    "mixed": {},
    "batch": {"max_running": 128, "max_waiting": 160, "max_step_tokens": 1024, "prefill_chunk_tokens": 512},
}


class SchedulerConfig(Settings):
    """Limits of a step and of the queue, and the order of requests."""

    preset: Preset = Field("mixed", description="set of default values for the limits below")
    strategy: Strategy = Field(ContinuousConfig(), description="rule for when waiting requests may join the batch")
    policy: Policy = Field(
        FcfsConfig(),
        description="order of waiting requests; with priority, ten seconds of waiting outweigh one priority class",
    )
    max_running: int = Field(32, ge=1, le=4096, description="maximum number of requests in one step")
    max_waiting: int = Field(256, ge=0, le=1_000_000, description="maximum number of queued requests on one replica")
    max_step_tokens: int = Field(
        512, ge=1, le=1_000_000, description="token budget of one step; if not set, at least max_running"
    )
    prefill_chunk_tokens: int = Field(256, ge=1, le=1_000_000, description="maximum tokens of one prompt in one step")
    targets: Annotated[TargetsConfig, BeforeValidator(lambda given: {} if given is None else given)] = TargetsConfig()

    @property
    def max_requests(self) -> int:
        """The maximum number of running and waiting requests on one replica, except background requests that yield.

        Ray Serve's own limits are derived from this number.
        """
        return self.max_running + self.max_waiting

    @property
    def version(self) -> str:
        """An id of the settings: the names of the preset, the strategy and the policy, and a hash of all values."""
        values = self.model_dump_json(exclude={"preset"}, exclude_none=True)  # the values include those of the preset
        digest = hashlib.blake2b(values.encode(), digest_size=4).hexdigest()
        return f"{self.preset}-{self.strategy.name}-{self.policy.name}-{digest}"

    def changed(self, changes: Mapping[str, Any]) -> SchedulerConfig:
        """Return a copy with these changes. Explicit settings are kept; values from the preset change with the preset.

        Raises pydantic's ValidationError.
        """
        asked = {name: getattr(self, name) for name in self.model_fields_set}
        return SchedulerConfig.model_validate({**asked, **changes})

    @model_validator(mode="wrap")
    @classmethod
    def _preset_fills_in(cls, given: Any, validated: ModelWrapValidatorHandler[SchedulerConfig]) -> SchedulerConfig:
        if not isinstance(given, Mapping):
            return validated(given)
        given = without_removed(given, within="models[].engine.scheduler")
        filled = {**PRESETS.get(str(given.get("preset")), {}), **given}
        config = validated(filled)
        if "max_step_tokens" not in given and config.max_step_tokens < config.max_running:
            config = validated(filled | {"max_step_tokens": config.max_running})
        config.model_fields_set.intersection_update(given)  # `changed` needs the explicit settings
        if config.max_step_tokens < config.max_running:
            by_preset = "" if "max_running" in given else f", which the preset {config.preset} sets"
            raise ValueError(
                f"max_step_tokens={config.max_step_tokens} is below max_running={config.max_running}{by_preset}, but "
                f"every running request needs one token per step; raise max_step_tokens or lower max_running"
            )
        return config
