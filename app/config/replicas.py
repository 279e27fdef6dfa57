"""The settings of replicas: their number, their devices and the dispatch of requests to them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from app.config.base import Name, Settings, repeated


class GroupConfig(Settings):
    """An arm of an A/B trial, with a share of the requests, its own replicas and its own settings."""

    name: Name = Field("a", description="name of the group, as in the header `x-carousel-group`")
    share: float = Field(1.0, gt=0, le=1e6, description="relative weight of the group's requests and replicas")
    scheduler: dict[str, Any] = Field({}, description="settings that override those of `engine.scheduler`")


class AutoscalingConfig(Settings):
    """Adapts the number of replicas to the outstanding work and the KV memory in use."""

    mode: Literal["act", "advise"] = Field(
        "act", description="act: change the number of replicas; advise: only report the best number and the reason"
    )
    min_replicas: int = Field(1, ge=0, le=1024, description="minimum number of replicas; 0: none when idle")
    max_replicas: int = Field(4, ge=1, le=1024, description="maximum number of replicas")
    target_s: float = Field(
        2.0,
        gt=0,
        le=86_400,
        description="target seconds of work per replica: its remaining prompt and output tokens divided by its speed",
    )
    downscale_delay_s: float = Field(
        120.0, ge=0, le=86_400, description="seconds of low load before the number of replicas is reduced"
    )
    scale_to_zero_after_s: float = Field(
        600.0, ge=0, le=86_400, description="seconds without a request before the last replica is stopped"
    )

    @model_validator(mode="after")
    def _limits_agree(self) -> AutoscalingConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas={self.min_replicas} is above max_replicas={self.max_replicas}; lower it")
        return self


class ReplicasConfig(Settings):
    """The number of replicas of an engine, their devices, and the dispatch of requests."""

    num_replicas: int = Field(2, ge=1, le=1024, description="number of replicas; with autoscaling, the initial number")
    autoscaling: AutoscalingConfig | None = Field(None, description="adapt the number to the load; default: fixed")
    num_cpus: float = Field(0.5, gt=0, description="CPUs that Ray reserves for each replica")
    num_gpus: float = Field(0, ge=0, description="GPUs that Ray reserves for each replica")
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="number of devices that compute each step together; Ray reserves num_cpus and num_gpus per device",
    )
    dispatch: Literal["round_robin", "least_loaded", "prefix_affinity"] = Field(
        "least_loaded",
        description="replica that receives a request. least_loaded: the one that would finish first; round_robin: each "
        "in turn; prefix_affinity: the one with the longest cached prefix of the prompt",
    )
    prefill_replicas: int | None = Field(
        None,
        ge=1,
        le=1023,
        description="replicas, out of num_replicas, that only prefill long prompts; the rest prefill short prompts and "
        "decode; autoscaling keeps the proportion; default: every replica does everything",
    )
    groups: tuple[GroupConfig, ...] = Field((), max_length=64, description="arms of an A/B trial")
    fetch_prefixes: bool | None = Field(
        None,
        description="whether replicas fetch a cached prefix from another replica if that is faster than prefill; "
        "default: on CPUs and with prefill_replicas",
    )
    drain_timeout_s: float = Field(120.0, gt=0, description="seconds for a stopping replica to finish its requests")
    max_surge_percent: int = Field(
        0,
        ge=0,
        le=100,
        description="extra replicas during an update, in percent of all replicas, rounded up; each old replica then "
        "stops only after a new one is ready; 0: an old replica stops first",
    )
    step_timeout_s: float = Field(
        60.0,
        gt=0,
        le=86_400,
        description="seconds that a step may take before its replica counts as hung; a replica that is silent for a "
        "twentieth of this time, at least one second, counts as lost",
    )
    place_timeout_s: float = Field(
        30.0, gt=0, le=86_400, description="seconds that a request waits for a replica if no replica is ready"
    )
    sleep_after_s: float | None = Field(
        None,
        ge=0,
        le=86_400,
        description="seconds without a request after which a replica frees its weights and KV memory; default: never",
    )
    device_memory_gib: float | None = Field(
        None,
        gt=0,
        description="memory in GiB for all replicas with `sleep_after_s` on one GPU, or on one machine's CPUs; "
        "replicas that do not fit take turns; default: 90% of the memory",
    )

    @model_validator(mode="after")
    def _every_group_gets_a_replica(self) -> ReplicasConfig:
        twice = repeated(group.name for group in self.groups)
        if twice:
            raise ValueError(f"several groups have the same name: {', '.join(twice)}; give each group its own")
        if len(self.groups) > self.num_replicas:
            raise ValueError(
                f"num_replicas={self.num_replicas} is too low for {len(self.groups)} groups, because every group needs "
                f"a replica; raise num_replicas or remove groups"
            )
        return self

    @model_validator(mode="after")
    def _roles_can_be_filled(self) -> ReplicasConfig:
        if self.prefill_replicas is None:
            return self
        if self.prefill_replicas >= self.num_replicas:
            raise ValueError(
                f"prefill_replicas={self.prefill_replicas} and num_replicas={self.num_replicas} leave no replica for "
                f"decode; raise num_replicas"
            )
        if self.is_elastic and self.min_replicas < 2:
            raise ValueError("prefill_replicas requires at least 2 replicas; raise autoscaling.min_replicas")
        for has, what in (
            (self.groups, "groups"),
            (self.tensor_parallel > 1, f"tensor_parallel={self.tensor_parallel}"),
            (self.fetch_prefixes is False, "fetch_prefixes=false"),
        ):
            if has:
                raise ValueError(
                    f"prefill_replicas and {what} cannot be combined, because replicas for prefill and decode must "
                    f"have equal settings and one process each, and must fetch KV memory from one another; remove one "
                    f"of the two"
                )
        return self

    @model_validator(mode="after")
    def _what_sleeps_is_whole(self) -> ReplicasConfig:
        if self.sleep_after_s is not None and self.tensor_parallel > 1:
            raise ValueError(
                f"sleep_after_s={self.sleep_after_s:g} and tensor_parallel={self.tensor_parallel} cannot be combined, "
                f"because replicas with several ranks cannot sleep; remove one of the two"
            )
        if self.device_memory_gib is not None and self.sleep_after_s is None:
            raise ValueError(
                f"device_memory_gib={self.device_memory_gib:g} affects only replicas that sleep; also set sleep_after_s"
            )
        return self

    @property
    def silence_timeout_s(self) -> float:
        """Seconds of silence after which a replica counts as lost. Slower machines need longer for both timeouts."""
        return max(1.0, self.step_timeout_s / 20)

    @property
    def reserved_cpus(self) -> float:
        """The CPUs that Ray reserves for all devices of one replica."""
        return self.num_cpus * self.tensor_parallel

    @property
    def reserved_gpus(self) -> float:
        """The GPUs that Ray reserves for all devices of one replica."""
        return self.num_gpus * self.tensor_parallel

    @property
    def gpu_share(self) -> float:
        """The fraction of a GPU's memory that one replica may use: half with `num_gpus: 0.5`."""
        return min(1.0, self.num_gpus or 1.0)

    @property
    def is_elastic(self) -> bool:
        """Whether autoscaling changes the number of replicas."""
        return self.autoscaling is not None and self.autoscaling.mode == "act"

    @property
    def min_replicas(self) -> int:
        """The smallest possible number of replicas."""
        return self.autoscaling.min_replicas if self.autoscaling and self.is_elastic else self.num_replicas

    @property
    def max_replicas(self) -> int:
        """The largest possible number of replicas."""
        return self.autoscaling.max_replicas if self.autoscaling and self.is_elastic else self.num_replicas

    @property
    def initial_replicas(self) -> int:
        """The number of replicas at startup. At least one, because the ingress asks a replica for the model info."""
        return min(max(self.num_replicas, self.min_replicas), self.max_replicas)

    @property
    def may_sleep(self) -> bool:
        """Whether the number of replicas may fall to zero while no requests arrive."""
        return self.min_replicas == 0
