"""The settings of pipelines: several steps under one name."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from app.config.base import Name, Settings, chosen

_MODEL = "model to run: for embed, one with embeddings; for rerank, also a cross-encoder; for generate, also a pipeline"


class RankingStepConfig(Settings):
    """Base class of the steps that choose documents."""

    model: Name = Field(description=_MODEL)
    top_n: int = Field(4, ge=1, le=1000, description="maximum number of documents to keep")


class RerankStepConfig(RankingStepConfig):
    """Keeps the best documents by the scores of `/v1/rerank`."""

    kind: Literal["rerank"] = "rerank"


class EmbedStepConfig(RankingStepConfig):
    """Keeps the best documents, from the request or from an index, by the cosine similarity of embeddings."""

    kind: Literal["embed"] = "embed"
    index: str | None = Field(
        None,
        min_length=1,
        description="file of documents, with a JSON object with `text` and optionally `id` on each line; default: the "
        "request's documents",
    )


class GenerateStepConfig(Settings):
    """A model answers."""

    kind: Literal["generate"] = "generate"
    model: Name = Field(description=_MODEL)


class CascadeStepConfig(Settings):
    """A small model answers first. If the small model was not sure, a large model answers instead."""

    kind: Literal["cascade"] = "cascade"
    small: Name = Field(description="model or pipeline that answers first")
    large: Name = Field(description="model or pipeline that answers if `small` was not sure")
    min_mean_logprob: float = Field(
        -1.0, ge=-100, le=0, description="minimum mean log-probability of its tokens at which `small` counts as sure"
    )

    @model_validator(mode="after")
    def _there_are_two(self) -> CascadeStepConfig:
        if self.small == self.large:
            raise ValueError(f"small and large are both {self.small!r}; name two different models")
        return self


class EnsembleStepConfig(Settings):
    """Several models answer, and one of their answers is chosen."""

    kind: Literal["ensemble"] = "ensemble"
    models: tuple[Name, ...] = Field(min_length=2, max_length=16, description="models or pipelines")
    choose: Literal["vote", "logprob"] = Field(
        "vote",
        description="vote: the most frequent text, or in a tie the most likely of these; logprob: the answer with the "
        "highest mean log-probability",
    )


_CONDITIONS = ("max_prompt_tokens", "values", "examples", "description")


class RouteCaseConfig(Settings):
    """A case of a route. It applies to the requests that match this case and no earlier one."""

    model: Name = Field(description="model or pipeline that answers")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="maximum prompt tokens; only in routes with neither a header nor a classifier"
    )
    values: tuple[str, ...] = Field((), max_length=256, description="the header's values, or the classifier's labels")
    examples: tuple[str, ...] = Field(
        (), max_length=64, description="example texts; the case with the example nearest to the user's last text wins"
    )
    description: str | None = Field(
        None, min_length=1, description="description of the requests, by which the classifier selects the case"
    )


class RouteStepConfig(Settings):
    """Chooses the model that answers by the first case that matches a request, before the answer is queued."""

    kind: Literal["route"] = "route"
    header: str | None = Field(
        None, pattern=r"^[a-z0-9-]+$", description="the request's header, in lower case, whose values the cases list"
    )
    classifier: Name | None = Field(
        None,
        description="model that classifies the user's last text: an embedding model for cases with examples, one with "
        "labels for values, one that generates for descriptions; default without a header: the prompt's length decides",
    )
    cases: tuple[RouteCaseConfig, ...] = Field(
        min_length=2,
        max_length=64,
        description="cases in order; the last one takes all other requests, unless cases have examples or descriptions",
    )

    @property
    def condition(self) -> str:
        """The setting of the cases that selects requests."""
        if self.classifier is None:
            return "max_prompt_tokens" if self.header is None else "values"
        given = (name for name in ("description", "values") if any(getattr(case, name) for case in self.cases))
        return next(given, "examples")

    @model_validator(mode="after")
    def _cases_are_told_apart(self) -> RouteStepConfig:
        if self.header is not None and self.classifier is not None:
            raise ValueError("a route cannot have both a header and a classifier; remove one of the two")
        by = "a header" if self.header else "a classifier" if self.classifier else "the prompt's length"
        for index, case in enumerate(self.cases):
            is_for_others = index == len(self.cases) - 1 and self.condition not in ("examples", "description")
            given = [name for name in _CONDITIONS if getattr(case, name)]
            wanted = [] if is_for_others else [self.condition]
            if given != wanted:
                raise ValueError(
                    f"cases[{index}] has {', '.join(given) or 'no condition'}; the route chooses by {by}, so the case "
                    f"must have {'no condition, to take all other requests' if is_for_others else self.condition}"
                )
        return self


AnsweringStepConfig = GenerateStepConfig | CascadeStepConfig | EnsembleStepConfig | RouteStepConfig
PipelineStepConfig = RerankStepConfig | EmbedStepConfig | AnsweringStepConfig
PipelineStep = Annotated[
    PipelineStepConfig,
    Field(discriminator="kind"),
    BeforeValidator(lambda value: chosen(value, PipelineStepConfig, key="kind")),
]


class PipelineConfig(Settings):
    """Steps under one name. The last step answers; the steps before it choose documents."""

    name: Name = Field(description="name that clients send as `model`")
    steps: tuple[PipelineStep, ...] = Field(min_length=1, max_length=16, description="steps in the order of execution")

    @model_validator(mode="after")
    def _the_last_step_answers(self) -> PipelineConfig:
        *earlier, last = self.steps
        for index, step in enumerate(earlier):
            if index and isinstance(step, EmbedStepConfig) and step.index is not None:
                raise ValueError(f"steps[{index}]: only the first step may have an index, which replaces all documents")
            if isinstance(step, AnsweringStepConfig):
                raise ValueError(
                    f"steps[{index}]: a step of kind {step.kind} produces the answer, so no step may follow it; make "
                    f"it the last step, or name this pipeline in a step of another pipeline"
                )
        if not isinstance(last, AnsweringStepConfig):
            raise ValueError(
                f"steps[{len(earlier)}]: the last step is of kind {last.kind}, which does not produce an answer; add a "
                f"step after it, such as {{kind: generate, model: ...}}"
            )
        return self


class NamedByStep(NamedTuple):
    """A model or a pipeline that a step runs."""

    field: str  # the step's field that contains the name
    name: str  # of a model, an alias, an adapter or a pipeline
    answers: bool  # False if the model ranks or classifies, which a pipeline cannot do


def named_by(step: PipelineStepConfig) -> list[NamedByStep]:
    """Return the models and pipelines that a step runs."""
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
