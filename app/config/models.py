"""The settings of one model that is served: its names, its engine and its replicas."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from app.config.base import Name, Settings
from app.config.engine import MAX_LOADED_ADAPTERS, EngineConfig
from app.config.mistakes import mistakes_of
from app.config.replicas import ReplicasConfig
from app.config.scheduler import SchedulerConfig


class PricesConfig(Settings):
    """What a million tokens cost, in any currency: the same for all models and budgets."""

    input: float = Field(0.0, ge=0, le=10**9, description="of a million prompt tokens")
    cached_input: float | None = Field(
        None, ge=0, le=10**9, description="of a million prompt tokens that were cached; default: as `input`"
    )
    output: float = Field(0.0, ge=0, le=10**9, description="of a million output tokens")

    def cost(self, *, num_prompt_tokens: int, num_cached_tokens: int = 0, num_output_tokens: int) -> float:
        """Of these tokens; the cached ones are among those of the prompts."""
        cached = self.input if self.cached_input is None else self.cached_input
        of_prompts = self.input * (num_prompt_tokens - num_cached_tokens) + cached * num_cached_tokens
        return (of_prompts + self.output * num_output_tokens) / 1e6


class ServedModelConfig(Settings):
    """A model, its engine and its replicas."""

    name: Name = Field("demo", description="what a client sends as `model`")
    aliases: tuple[Name, ...] = Field((), max_length=64, description="other names for it")
    tool_parser: Literal[
        "auto", "none", "hermes", "llama3", "mistral", "qwen3_coder", "lfm2", "granite", "nemotron", "gemma4"
    ] = Field("auto", description="format of tool calls; auto: the chat template's, if it is one of these")
    pooling: Literal["auto", "last", "mean", "cls", "none"] = Field(
        "auto",
        description="an embedding: the hidden state of the last token, the mean of all, the first of an "
        "encoder, or none; auto: by 1_Pooling/config.json, else last, of an encoder mean",
    )
    deadline_s: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="seconds for a request without its own `deadline_s`, waiting included; not for background "
        "requests; default: no limit",
    )
    adapters: dict[Name, str] = Field(
        {}, max_length=1024, description="LoRA adapters: a folder or hub id by the name that clients send as `model`"
    )
    prices: PricesConfig = PricesConfig()
    engine: EngineConfig = EngineConfig()
    replicas: ReplicasConfig = ReplicasConfig()

    @property
    def engine_with_adapters(self) -> EngineConfig:
        """The engine's settings; where adapters are configured, so is how many are in memory at once."""
        if not self.adapters or self.engine.model.max_loaded_adapters is not None:
            return self.engine
        return self.engine.with_setting("model.max_loaded_adapters", MAX_LOADED_ADAPTERS)

    def scheduler_of(self, group: str) -> SchedulerConfig:
        """The scheduler's settings on the replicas of a group; the engine's for "" and for a group there is not."""
        changes = next((each.scheduler for each in self.replicas.groups if each.name == group), {})
        return self.engine.scheduler.changed(changes)

    @property
    def deployment_name(self) -> str:
        """Its Serve deployment; Serve forbids some of what model names may have."""
        return "replica-" + re.sub(r"[^A-Za-z0-9_.-]", "-", self.name)

    @property
    def all_names(self) -> tuple[str, ...]:
        """Its name, its aliases and the names of its adapters."""
        return self.name, *self.aliases, *self.adapters

    @model_validator(mode="after")
    def _groups_can_be_scheduled(self) -> ServedModelConfig:
        max_requests = self.engine.scheduler.max_requests
        for index, group in enumerate(self.replicas.groups):
            where = f"replicas.groups[{index}].scheduler"
            try:
                scheduler = self.scheduler_of(group.name)
            except ValidationError as error:
                raise ValueError(f"{mistakes_of(error, SchedulerConfig, at=where)[0]}") from error
            if scheduler.max_requests > max_requests:
                raise ValueError(
                    f"{where}: max_running + max_waiting is {scheduler.max_requests:,}; the model's replicas take "
                    f"{max_requests:,} by engine.scheduler: raise it there"
                )
        return self
