"""The settings of one served model: its names, its engine and its replicas."""

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
    """Prices per million tokens, in any currency. All models and budgets must use the same currency."""

    input: float = Field(0.0, ge=0, le=10**9, description="price per million prompt tokens")
    cached_input: float | None = Field(
        None, ge=0, le=10**9, description="price per million cached prompt tokens; default: the price of `input`"
    )
    output: float = Field(0.0, ge=0, le=10**9, description="price per million output tokens")

    def cost(self, *, num_prompt_tokens: int, num_cached_tokens: int = 0, num_output_tokens: int) -> float:
        """Return the cost of these tokens. `num_prompt_tokens` includes the cached tokens."""
        cached = self.input if self.cached_input is None else self.cached_input
        of_prompts = self.input * (num_prompt_tokens - num_cached_tokens) + cached * num_cached_tokens
        return (of_prompts + self.output * num_output_tokens) / 1e6


class ServedModelConfig(Settings):
    """A model, its engine and its replicas."""

    name: Name = Field("demo", description="name that clients send as `model`")
    aliases: tuple[Name, ...] = Field((), max_length=64, description="other names of the model")
    tool_parser: Literal[
        "auto", "none", "hermes", "llama3", "mistral", "qwen3_coder", "lfm2", "granite", "nemotron", "gemma4"
    ] = Field("auto", description="format of tool calls; auto: the chat template's format, if it is listed here")
    pooling: Literal["auto", "last", "mean", "cls", "none"] = Field(
        "auto",
        description="hidden state for embeddings. last: the last token's; mean: the mean of all; cls: an encoder's "
        "first token's; auto: as in 1_Pooling/config.json, otherwise mean for encoders and last for other models",
    )
    deadline_s: float | None = Field(
        None,
        gt=0,
        le=86_400,
        description="seconds within which a request must finish, including its time in the queue, unless it sets its "
        "own `deadline_s`; does not apply to background requests; default: no limit",
    )
    adapters: dict[Name, str] = Field(
        {}, max_length=1024, description="LoRA adapters: folder or hub id, by the name that clients send as `model`"
    )
    prices: PricesConfig = PricesConfig()
    engine: EngineConfig = EngineConfig()
    replicas: ReplicasConfig = ReplicasConfig()

    @property
    def engine_with_adapters(self) -> EngineConfig:
        """The engine's settings, with `max_loaded_adapters` set if adapters are configured."""
        if not self.adapters or self.engine.model.max_loaded_adapters is not None:
            return self.engine
        return self.engine.with_setting("model.max_loaded_adapters", MAX_LOADED_ADAPTERS)

    def scheduler_of(self, group: str) -> SchedulerConfig:
        """Return the scheduler's settings for a group's replicas, or the engine's for "" or an unknown group."""
        changes = next((each.scheduler for each in self.replicas.groups if each.name == group), {})
        return self.engine.scheduler.changed(changes)

    @property
    def deployment_name(self) -> str:
        """The name of the model's Serve deployment, without characters that Serve does not allow."""
        return "replica-" + re.sub(r"[^A-Za-z0-9_.-]", "-", self.name)

    @property
    def all_names(self) -> tuple[str, ...]:
        """The name, the aliases and the names of the adapters."""
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
                    f"{where}: max_running + max_waiting is {scheduler.max_requests:,}, but engine.scheduler allows "
                    f"only {max_requests:,} for the model's replicas; raise the limits there"
                )
        return self
