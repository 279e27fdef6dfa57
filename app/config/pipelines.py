"""The settings of pipelines: several steps under one name."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from app.config.base import Name, Settings, chosen
from app.config.scheduler import Preset


class RankingStepConfig(Settings):
    """What the steps have in common that choose documents."""

    model: Name = Field(description="a model with embeddings, or for rerank a cross-encoder")
    top_n: int = Field(4, ge=1, le=1000, description="documents kept, at most")


class RerankStepConfig(RankingStepConfig):
    """Keeps the best documents by the scores of `/v1/rerank`."""

    kind: Literal["rerank"] = "rerank"


class EmbedStepConfig(RankingStepConfig):
    """Keeps the best documents by the cosines of embeddings, of the request or of an index."""

    kind: Literal["embed"] = "embed"
    index: str | None = Field(
        None,
        min_length=1,
        description="file of documents, in each line a JSON object with `text` and optionally `id`; default: "
        "the request's documents",
    )


class GenerateStepConfig(Settings):
    """A model answers."""

    kind: Literal["generate"] = "generate"
    model: Name = Field(description="a model, or another pipeline")


class CascadeStepConfig(Settings):
    """A small model answers where it was sure, else a large one."""

    kind: Literal["cascade"] = "cascade"
    small: Name = Field(description="model or pipeline that answers first")
    large: Name = Field(description="the one that answers when `small` was not sure")
    min_mean_logprob: float = Field(
        -1.0, ge=-100, le=0, description="mean log-probability of the tokens of `small` from which on it was sure"
    )

    @model_validator(mode="after")
    def _there_are_two(self) -> CascadeStepConfig:
        if self.small == self.large:
            raise ValueError(f"small and large are both {self.small!r}; name two")
        return self


class EnsembleStepConfig(Settings):
    """Several models answer, and one of their answers is chosen."""

    kind: Literal["ensemble"] = "ensemble"
    models: tuple[Name, ...] = Field(min_length=2, max_length=16, description="models or pipelines")
    choose: Literal["vote", "logprob"] = Field(
        "vote",
        description="vote: the most frequent text, of several the likeliest; logprob: the answer with the "
        "highest mean log-probability",
    )


class RouteCaseConfig(Settings):
    """It takes requests that no case before it takes."""

    model: Name = Field(description="model or pipeline that answers")
    preset: Preset | None = Field(None, description="only replicas of groups with this preset")
    max_prompt_tokens: int | None = Field(None, ge=1, description="by length: tokens of the prompt, at most")
    values: tuple[str, ...] = Field(
        (), max_length=256, description="by header: its values; by classifier: the model's labels, instead of examples"
    )
    examples: tuple[str, ...] = Field((), max_length=64, description="by classifier: texts of this kind")
    description: str | None = Field(None, min_length=1, description="by decision: which requests it is for, in words")


class RouteStepConfig(Settings):
    """The first case that a request fits says which model answers, before anything of the answer is queued."""

    kind: Literal["route"] = "route"
    by: Literal["length", "header", "classifier", "decision"] = Field(
        description="length of the prompt, a header, or the last text: the example nearest to it, a model's label for "
        "it, or the description that a model chooses for it"
    )
    header: str | None = Field(None, pattern=r"^[a-z0-9-]+$", description="by header: its name, in lower case")
    classifier: Name | None = Field(
        None, description="by classifier: a model with embeddings, or one with labels; by decision: one that generates"
    )
    cases: tuple[RouteCaseConfig, ...] = Field(
        min_length=2,
        max_length=64,
        description="in order; the last is for all others, except with examples and descriptions",
    )

    @property
    def has_labels(self) -> bool:
        """Whether its classifier gives labels, which the cases name; else they have examples."""
        return self.classifier is not None and bool(self.cases[0].values)

    @model_validator(mode="after")
    def _cases_are_told_apart(self) -> RouteStepConfig:
        conditions = {
            "length": "max_prompt_tokens", "header": "values", "classifier": "examples", "decision": "description",
        }  # fmt: skip
        condition = "values" if self.by == "classifier" and self.has_labels else conditions[self.by]
        for name, kinds in (("header", ["header"]), ("classifier", ["classifier", "decision"])):
            if (getattr(self, name) is None) == (self.by in kinds):
                asked = " or ".join(kinds)
                raise ValueError(f"{name} is for a route by {asked}, which needs it, and this one is by {self.by}")
        for index, case in enumerate(self.cases):
            is_for_others = index == len(self.cases) - 1 and condition not in ("examples", "description")
            given = [name for name in dict.fromkeys(conditions.values()) if getattr(case, name)]
            wanted = [] if is_for_others else [condition]
            if given != wanted:
                raise ValueError(
                    f"cases[{index}] has {', '.join(given) or 'no condition'}; of a route by {self.by} it "
                    f"{'is for all others and has none' if is_for_others else f'has {condition}'}"
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
    """Steps under one name: the last one answers, those before it choose documents."""

    name: Name = Field(description="what a client sends as `model`")
    steps: tuple[PipelineStep, ...] = Field(min_length=1, max_length=16, description="in their order")

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
