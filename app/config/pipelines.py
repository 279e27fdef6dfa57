"""The settings of pipelines: several steps under one name."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from app.config.base import Name, Settings, chosen

_MODEL = "model that runs: with embeddings, for rerank also a cross-encoder; for generate also another pipeline"


class RankingStepConfig(Settings):
    """Base class of the steps that choose documents."""

    model: Name = Field(description=_MODEL)
    top_n: int = Field(4, ge=1, le=1000, description="maximum number of documents to keep")


class RerankStepConfig(RankingStepConfig):
    """Keeps the best documents by the scores of `/v1/rerank`."""

    kind: Literal["rerank"] = "rerank"


class EmbedStepConfig(RankingStepConfig):
    """Keeps the best documents, of the request or of an index, by the cosine similarity of embeddings."""

    kind: Literal["embed"] = "embed"
    index: str | None = Field(
        None,
        min_length=1,
        description="file of documents; each line is a JSON object with `text` and optionally `id`; default: the "
        "documents of the request",
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
        -1.0, ge=-100, le=0, description="`small` was sure if the mean log-probability of its tokens is at least this"
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
        description="vote: the most frequent text, or the likeliest one of several equally frequent texts; logprob: "
        "the answer with the highest mean log-probability",
    )


_CONDITIONS = ("max_prompt_tokens", "values", "examples", "description")


class RouteCaseConfig(Settings):
    """A case of a route. A case takes the requests that fit it and no earlier case."""

    model: Name = Field(description="model or pipeline that answers")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="maximum tokens of the prompt; without a header or a classifier"
    )
    values: tuple[str, ...] = Field((), max_length=256, description="values of the header, or labels of the classifier")
    examples: tuple[str, ...] = Field(
        (), max_length=64, description="example texts: the case with the example nearest to the last text is chosen"
    )
    description: str | None = Field(
        None, min_length=1, description="the requests of the case in words: the classifier chooses for the last text"
    )


class RouteStepConfig(Settings):
    """Chooses the model that answers by the first case that a request fits, before the answer is queued."""

    kind: Literal["route"] = "route"
    header: str | None = Field(
        None, pattern=r"^[a-z0-9-]+$", description="header of the request, in lower case, whose values the cases list"
    )
    classifier: Name | None = Field(
        None,
        description="model for the last text: with embeddings if the cases have examples, with labels if they have "
        "values, and one that generates if they have descriptions; default without a header: the prompt's length",
    )
    cases: tuple[RouteCaseConfig, ...] = Field(
        min_length=2,
        max_length=64,
        description="cases in order; the last takes all other requests, unless cases have examples or descriptions",
    )

    @property
    def condition(self) -> str:
        """The setting of a case that says which requests the case takes."""
        if self.classifier is None:
            return "max_prompt_tokens" if self.header is None else "values"
        given = (name for name in ("description", "values") if any(getattr(case, name) for case in self.cases))
        return next(given, "examples")

    @model_validator(mode="after")
    def _cases_are_told_apart(self) -> RouteStepConfig:
        if self.header is not None and self.classifier is not None:
            raise ValueError("a route has a header or a classifier; remove one of the two")
        by = "a header" if self.header else "a classifier" if self.classifier else "the prompt's length"
        for index, case in enumerate(self.cases):
            is_for_others = index == len(self.cases) - 1 and self.condition not in ("examples", "description")
            given = [name for name in _CONDITIONS if getattr(case, name)]
            wanted = [] if is_for_others else [self.condition]
            if given != wanted:
                raise ValueError(
                    f"cases[{index}] has {', '.join(given) or 'no condition'}; in this route by {by}, the case must "
                    f"{'have no condition and takes all other requests' if is_for_others else f'have {self.condition}'}"
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
                    f"steps[{index}]: {step.kind} answers, so no step may follow; make it the last step, or name this "
                    f"pipeline in a step of another pipeline"
                )
        if not isinstance(last, AnsweringStepConfig):
            raise ValueError(
                f"steps[{len(earlier)}]: {last.kind} is the last step and does not answer; add a step after it, such "
                f"as {{kind: generate, model: ...}}"
            )
        return self


class NamedByStep(NamedTuple):
    """A model or a pipeline that a step runs."""

    field: str  # the field of the step that has the name
    name: str  # of a model, an alias, an adapter or a pipeline
    answers: bool  # False: the model ranks or classifies, which a pipeline cannot do


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
