"""How many replicas of an engine run, on what, and how requests reach them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from app.config.base import Name, Settings, repeated


class GroupConfig(Settings):
    """An arm of an A/B trial: a share of the requests, replicas and settings of its own."""

    name: Name = Field("a", description="for the header `x-carousel-group`")
    share: float = Field(1.0, gt=0, le=1e6, description="weight among the groups, for requests and replicas")
    scheduler: dict[str, Any] = Field({}, description="settings that differ from `engine.scheduler`")


class RolesConfig(Settings):
    """Replicas that compute long prompts, and others that go on with their requests."""

    prefill: int = Field(1, ge=1, le=1024, description="replicas that compute long prompts")
    decode: int = Field(1, ge=1, le=1024, description="replicas for short prompts and all further tokens")


class AutoscalingConfig(Settings):
    """How many replicas there are, by outstanding work and KV memory in use."""

    mode: Literal["act", "advise"] = Field(
        "act", description="advise: their number stays num_replicas; how many it would be is reported with the reason"
    )
    min_replicas: int = Field(1, ge=0, le=1024, description="at least; 0: none while there is nothing to do")
    max_replicas: int = Field(4, ge=1, le=1024, description="at most")
    target_s: float = Field(
        2.0,
        gt=0,
        le=86_400,
        description="seconds of work for each replica: tokens of prompts and outputs still to compute, by its speed",
    )
    downscale_delay_s: float = Field(
        120.0, ge=0, le=86_400, description="seconds of too little load before there are fewer"
    )
    scale_to_zero_after_s: float = Field(
        600.0, ge=0, le=86_400, description="seconds without a request before the last replica goes"
    )

    @model_validator(mode="after")
    def _limits_agree(self) -> AutoscalingConfig:
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas={self.min_replicas} is above max_replicas={self.max_replicas}")
        return self


class ReplicasConfig(Settings):
    """How many copies of an engine run, on what, and which gets a request."""

    num_replicas: int = Field(2, ge=1, le=1024, description="engines of this model; with autoscaling, at first")
    autoscaling: AutoscalingConfig | None = Field(None, description="their number follows the load; default: fixed")
    num_cpus: float = Field(0.5, gt=0, description="CPUs Ray reserves for each")
    num_gpus: float = Field(0, ge=0, description="GPUs Ray reserves for each")
    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="devices that compute each step together; Ray reserves as much for each",
    )
    dispatch: Literal["round_robin", "least_loaded", "prefix_affinity"] = Field(
        "least_loaded",
        description="least_loaded: to the replica that would be done first; round_robin: to each in turn; "
        "prefix_affinity: to the longest cached beginning of the prompt",
    )
    roles: RolesConfig | None = Field(
        None, description="prompts and further tokens on replicas of their own; default: all do both"
    )
    groups: tuple[GroupConfig, ...] = Field((), max_length=64, description="arms of an A/B trial")
    fetch_prefixes: bool | None = Field(
        None,
        description="a replica fetches the beginning of a prompt from another one where that is quicker; default: on "
        "CPUs and with roles",
    )
    drain_timeout_s: float = Field(120.0, gt=0, description="seconds a stopping replica may finish what it has")
    max_surge_percent: int = Field(
        0,
        ge=0,
        le=100,
        description="further replicas during an update, of all, rounded up: an old one stops when a new one serves; 0: "
        "an old one stops first",
    )
    silence_timeout_s: float = Field(
        3.0, ge=0.2, le=3600, description="seconds without a sign of life until a replica counts as lost"
    )
    step_timeout_s: float = Field(
        60.0, gt=0, le=86_400, description="seconds of one step until its replica counts as hung"
    )
    place_timeout_s: float = Field(
        30.0, gt=0, le=86_400, description="seconds a request waits for a replica while there is none"
    )
    sleep_after_s: float | None = Field(
        None,
        ge=0,
        le=86_400,
        description="seconds without a request until a replica gives up the memory of weights and KV; default: never",
    )
    device_memory_gib: float | None = Field(
        None,
        gt=0,
        description="GiB of all replicas with `sleep_after_s` on a GPU, or on a machine's CPUs; those that do "
        "not fit take turns; default: 90% of what there is",
    )

    @model_validator(mode="after")
    def _every_group_gets_a_replica(self) -> ReplicasConfig:
        twice = repeated(group.name for group in self.groups)
        if twice:
            raise ValueError(f"groups have the same name: {', '.join(twice)}; give each its own")
        if len(self.groups) > self.num_replicas:
            raise ValueError(
                f"{len(self.groups)} groups and num_replicas={self.num_replicas}: every group needs a replica; "
                f"raise num_replicas or remove groups"
            )
        return self

    @model_validator(mode="after")
    def _roles_can_be_filled(self) -> ReplicasConfig:
        roles = self.roles
        if roles is None:
            return self
        number = roles.prefill + roles.decode
        if not self.is_elastic and number != self.num_replicas:
            raise ValueError(
                f"roles are for {roles.prefill} + {roles.decode} replicas and num_replicas={self.num_replicas}: set it "
                f"to {number}"
            )
        if self.is_elastic and min(self.initial_replicas, self.min_replicas) < 2:
            raise ValueError("roles need 2 replicas at least: raise num_replicas and autoscaling.min_replicas")
        for has, what in (
            (self.groups, "groups"),
            (self.tensor_parallel > 1, f"tensor_parallel={self.tensor_parallel}"),
            (self.fetch_prefixes is False, "fetch_prefixes=false"),
        ):
            if has:
                raise ValueError(
                    f"roles and {what}: replicas with roles fetch KV memory from one another, all alike, in one "
                    f"process each; remove one of the two"
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
    def is_elastic(self) -> bool:
        """Whether their number changes by itself."""
        return self.autoscaling is not None and self.autoscaling.mode == "act"

    @property
    def min_replicas(self) -> int:
        """As few as there can ever be."""
        return self.autoscaling.min_replicas if self.autoscaling and self.is_elastic else self.num_replicas

    @property
    def max_replicas(self) -> int:
        """As many as there can ever be."""
        return self.autoscaling.max_replicas if self.autoscaling and self.is_elastic else self.num_replicas

    @property
    def initial_replicas(self) -> int:
        """As many as there are at first: at least one, for the ingress asks it what the model allows."""
        return min(max(self.num_replicas, self.min_replicas), self.max_replicas)

    @property
    def may_sleep(self) -> bool:
        """Whether there may be none while there is nothing to do."""
        return self.min_replicas == 0
