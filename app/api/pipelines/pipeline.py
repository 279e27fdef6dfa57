"""A pipeline: the steps of one name, made of the config and the served models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from app.api.auth.limits import Account
from app.api.call import ServedModel
from app.api.output.progress import Json
from app.api.pipelines.cascade import CascadeStep
from app.api.pipelines.ranking import RerankStep
from app.api.pipelines.run import PendingAnswer, PipelineRun, Target
from app.config import (
    AnsweringStepConfig,
    CascadeStepConfig,
    GenerateStepConfig,
    PipelineConfig,
    PipelineStepConfig,
    RankingStepConfig,
    named_by,
)
from app.errors import InvalidSetup


class AnsweringStep(Protocol):
    """The last step."""

    @property
    def targets(self) -> tuple[Target, ...]:
        """What may answer."""

    async def answer(self, run: PipelineRun) -> PendingAnswer:
        """The answer, with all done that must be done before its first token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateStep:
    """One model or pipeline answers."""

    name: str
    target: Target
    kind: str = "generate"

    @property
    def targets(self) -> tuple[Target, ...]:
        return (self.target,)

    async def answer(self, run: PipelineRun) -> PendingAnswer:
        start = await run.prepared(self.target, self)
        return await start()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Steps under one name."""

    name: str
    ranking: tuple[RerankStep, ...]
    answering: AnsweringStep

    async def answer(self, run: PipelineRun) -> PendingAnswer:
        """Run all steps that come before the first token of the answer."""
        for step in self.ranking:
            run = await step.ranked(run)
        return await self.answering.answer(run)

    def answering_models(self) -> Iterator[ServedModel]:
        """The models that may answer, those of pipelines that it names too; one may come twice."""
        for target in self.answering.targets:
            yield from (target,) if isinstance(target, ServedModel) else target.answering_models()

    def models(self) -> Iterator[ServedModel]:
        """All models that may run; one may come twice."""
        yield from (step.model for step in self.ranking)
        for target in self.answering.targets:
            yield from (target,) if isinstance(target, ServedModel) else target.models()

    def is_for(self, account: Account) -> bool:
        """Whether the account may use all of its models."""
        return all(account.may_use(model.base) for model in self.models())

    def check_account(self, account: Account) -> None:
        """Raises NotPermitted where the account may not use one of the models."""
        for model in self.models():
            account.check_model(model.base)

    def entry(self) -> Json:
        """Its entry in /v1/models: the context is the smallest of the models that may answer."""
        models = list(self.answering_models())
        longest = min(model.facts.max_model_len for model in models)
        return models[0].entry(self.name) | {"max_model_len": longest}


def pipelines_of(configs: Iterable[PipelineConfig], models: Iterable[ServedModel]) -> list[Pipeline]:
    """The pipelines over these models, which have those that the configs name.

    Raises InvalidSetup for a model that cannot do what a step asks of it.
    """
    builder = _Builder(list(configs), {model.name: model for model in models})
    return [builder.pipeline(config.name) for config in builder.configs]


class _Builder:
    """Makes each pipeline once, those that it names before it."""

    def __init__(self, configs: Sequence[PipelineConfig], models: Mapping[str, ServedModel]) -> None:
        self.configs = configs
        self._models = models
        self._built: dict[str, Pipeline] = {}

    def pipeline(self, name: str) -> Pipeline:
        """The pipeline of this name."""
        if name not in self._built:
            index, config = next((at, each) for at, each in enumerate(self.configs) if each.name == name)
            for place, step in enumerate(config.steps):
                self._check(f"pipelines[{index}].steps[{place}]", step)
            *ranking, last = config.steps
            self._built[name] = Pipeline(
                name=name,
                ranking=tuple(self._ranking(f"{name}[{place}]", step) for place, step in enumerate(ranking)),
                answering=self._answering(f"{name}[{len(ranking)}]", last),
            )
        return self._built[name]

    def _check(self, path: str, step: PipelineStepConfig) -> None:
        for field, name in named_by(step):
            model = self._models.get(name)
            if model is None:
                continue
            if isinstance(step, AnsweringStepConfig):
                if not model.facts.generates:
                    raise InvalidSetup(f"{path}.{field}: {name} is an encoder, which answers nothing; name another")
            elif not (model.gives_embeddings or model.facts.scores_pairs):
                raise InvalidSetup(f"{path}.{field}: {name} gives neither embeddings nor scores; name another")

    def _ranking(self, name: str, step: PipelineStepConfig) -> RerankStep:
        assert isinstance(step, RankingStepConfig), "the config is checked"
        return RerankStep(name=name, model=self._models[step.model], top_n=step.top_n)

    def _answering(self, name: str, step: PipelineStepConfig) -> AnsweringStep:
        match step:
            case GenerateStepConfig():
                return GenerateStep(name=name, target=self._target(step.model))
            case CascadeStepConfig():
                return CascadeStep(
                    name=name,
                    small=self._target(step.small),
                    large=self._target(step.large),
                    min_mean_logprob=step.min_mean_logprob,
                )
        raise AssertionError(f"the config is checked, and {step.kind} does not answer")

    def _target(self, name: str) -> Target:
        return self._models.get(name) or self.pipeline(name)
