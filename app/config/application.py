"""The whole tree: the models, the API, pipelines and batches of one Serve application."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import (
    Field,
    ValidationError,
    model_validator,
)

from app.config.api import ApiConfig
from app.config.base import Name, Settings, repeated
from app.config.batches import BatchesConfig
from app.config.engine import MAX_LOADED_ADAPTERS, EngineConfig
from app.config.pipelines import PipelineConfig, RouteStepConfig, find_circle, named_by
from app.config.removed import refuse_removed
from app.config.replicas import ReplicasConfig
from app.config.scheduler import SchedulerConfig


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


class IngressConfig(Settings):
    """The HTTP side."""

    num_replicas: int = Field(1, ge=1, le=256, description="ingress processes")


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
    def _has_no_removed_settings(cls, given: Any) -> Any:
        refuse_removed(given)
        return given

    @model_validator(mode="after")
    def _names_are_unique(self) -> ApplicationConfig:
        names = [name for model in self.models for name in (model.name, *model.aliases, *model.adapters)]
        twice = repeated([*names, *(pipeline.name for pipeline in self.pipelines)])
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
            circle = find_circle(name, pipelines, sound)
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
