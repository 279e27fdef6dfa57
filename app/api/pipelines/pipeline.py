"""Pipelines, built from the config and the served models. A pipeline runs several steps under one model name."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from app.api.auth.limits import Account
from app.api.pipelines.index import DocumentIndex, IndexStep, read_index
from app.api.pipelines.route import ByDecision, ByExample, ByHeader, ByLabel, ByLength, Chooser, RouteStep
from app.api.pipelines.run import PendingAnswer, PipelineRun, Target
from app.api.pipelines.steps import CascadeStep, EnsembleStep, GenerateStep, RerankStep
from app.api.prepared_request import ServedModel, by_any_name
from app.config import (
    ApplicationConfig,
    CascadeStepConfig,
    EmbedStepConfig,
    EnsembleStepConfig,
    GenerateStepConfig,
    NamedByStep,
    PipelineConfig,
    PipelineStepConfig,
    RankingStepConfig,
    RerankStepConfig,
    RouteStepConfig,
    named_by,
)
from app.errors import InvalidSetup, traceback_of
from app.json_pieces import Json

logger = logging.getLogger(__name__)

RankingStep = RerankStep | IndexStep


class AnsweringStep(Protocol):
    """The last step of a pipeline, which generates the answer."""

    @property
    def targets(self) -> tuple[Target, ...]:
        """The models and pipelines that may answer."""

    async def answer(self, run: PipelineRun) -> PendingAnswer:
        """Do all work before the first token of the answer, and return the pending answer."""


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Steps that clients call under one model name. Ranking steps choose documents, and the last step answers."""

    name: str
    ranking: tuple[RankingStep, ...]
    answering: AnsweringStep

    async def answer(self, run: PipelineRun) -> PendingAnswer:
        """Run all steps before the first token of the answer, and return the pending answer."""
        for step in self.ranking:
            run = await step.ranked(run)
        return await self.answering.answer(run)

    @cached_property
    def answering_models(self) -> tuple[ServedModel, ...]:
        """The models that may answer, without duplicates. Includes the models of named pipelines."""
        return _each_once(
            model
            for target in self.answering.targets
            for model in ((target,) if isinstance(target, ServedModel) else target.answering_models)
        )

    @cached_property
    def models(self) -> tuple[ServedModel, ...]:
        """All models that may run, without duplicates."""
        aside = [step.model for step in self.ranking]
        if isinstance(self.answering, RouteStep):
            aside += self.answering.others
        of_targets = (
            model
            for target in self.answering.targets
            for model in ((target,) if isinstance(target, ServedModel) else target.models)
        )
        return _each_once((*aside, *of_targets))

    def is_for(self, account: Account) -> bool:
        """Return whether the account may use all models of the pipeline."""
        return all(account.may_use(model.base) for model in self.models)

    def check_account(self, account: Account) -> None:
        """Raise NotPermitted if the account may not use one of the models."""
        for model in self.models:
            account.check_model(model.base)

    def entry(self) -> Json:
        """Return the pipeline's entry in /v1/models, with the shortest context of the models that may answer."""
        models = self.answering_models
        longest = min(model.model_info.max_model_len for model in models)
        return models[0].entry(self.name) | {"max_model_len": longest}


def _each_once(models: Iterable[ServedModel]) -> tuple[ServedModel, ...]:
    return tuple({model.name: model for model in models}.values())


def pipelines_of(config: ApplicationConfig, models: Iterable[ServedModel]) -> list[Pipeline]:
    """Build the configured pipelines from `models`, which must be the models of the config.

    Raises InvalidSetup if a model is not suitable for its step.
    """
    known = by_any_name(models)
    adapters = {
        name: replace(known[model.name], name=name, aliases=(), parent=model.name)
        for model in config.models
        for name in model.adapters
    }
    builder = _Builder(config.pipelines, known | adapters)
    return [builder.pipeline(each.name) for each in config.pipelines]


async def fill_indexes(pipelines: Iterable[Pipeline]) -> None:
    """Compute the vectors of all indexes that have no valid stored vectors. Requests may arrive meanwhile."""
    for pipeline in pipelines:
        for step in pipeline.ranking:
            if isinstance(step, IndexStep):
                try:
                    await step.index.matrix()
                except Exception as error:  # the next request tries again
                    logger.error("computing the index vectors of %s failed: %s", step.name, traceback_of(error))


class _Builder:
    """Builds each pipeline once, after the pipelines that it names."""

    def __init__(self, configs: Sequence[PipelineConfig], models: Mapping[str, ServedModel]) -> None:
        """`models` contains each model under all of its names. An adapter's files are looked up only for a request."""
        self._configs = configs
        self._models = models
        self._built: dict[str, Pipeline] = {}

    def pipeline(self, name: str) -> Pipeline:
        """Return the pipeline with this name. Raises InvalidSetup."""
        if name not in self._built:
            index, config = next((at, each) for at, each in enumerate(self._configs) if each.name == name)
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
        for named in named_by(step):
            model = self._models.get(named.name)
            wrong = "" if model is None else _why_not(step, named, model)
            if wrong:
                raise InvalidSetup(f"{path}.{named.field}: {named.name} {wrong}; name another model")

    def _ranking(self, name: str, step: PipelineStepConfig) -> RankingStep:
        assert isinstance(step, RankingStepConfig), "the config is checked"
        model = self._models[step.model]
        if isinstance(step, EmbedStepConfig) and step.index is not None:
            try:
                documents = read_index(step.index)
            except InvalidSetup as error:
                raise InvalidSetup(f"the index of {name} cannot be used: {error.message}") from error
            index = DocumentIndex(step.index, documents, model)
            return IndexStep(name=name, model=model, top_n=step.top_n, index=index)
        return RerankStep(name=name, kind=step.kind, model=model, top_n=step.top_n)

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
            case EnsembleStepConfig():
                return EnsembleStep(name=name, targets=tuple(map(self._target, step.models)), choose=step.choose)
            case RouteStepConfig():
                targets = tuple(self._target(case.model) for case in step.cases)
                return RouteStep(name=name, targets=targets, chooser=self._chooser(step))
        raise AssertionError(f"the config is checked, and {step.kind} does not answer")

    def _chooser(self, step: RouteStepConfig) -> Chooser:
        if step.classifier is not None and step.condition == "description":
            return ByDecision(self._models[step.classifier], [case.description or "" for case in step.cases])
        if step.classifier is not None and step.condition == "values":
            return ByLabel(self._models[step.classifier], [case.values for case in step.cases[:-1]])
        if step.classifier is not None:
            return ByExample(self._models[step.classifier], [case.examples for case in step.cases])
        if step.header is not None:
            return ByHeader(step.header, [case.values for case in step.cases[:-1]])
        return ByLength([case.max_prompt_tokens for case in step.cases if case.max_prompt_tokens is not None])

    def _target(self, name: str) -> Target:
        return self._models.get(name) or self.pipeline(name)


def _why_not(step: PipelineStepConfig, named: NamedByStep, model: ServedModel) -> str:
    """Return the reason why a model is not suitable for a step, or "" if the model is suitable."""
    if named.answers:
        return "" if model.model_info.generates else "is an encoder, which cannot generate an answer"
    if isinstance(step, RerankStepConfig) and model.model_info.scores_pairs:
        return ""
    if isinstance(step, RouteStepConfig) and step.condition == "description":
        chats = model.model_info.generates and model.tokenizer.has_chat_template
        return "" if chats else "has no chat template, so it cannot answer questions"
    if isinstance(step, RouteStepConfig) and step.condition == "values":
        wrong = {value for case in step.cases for value in case.values} - {*model.model_info.labels}
        return (
            f"has no label {min(wrong)!r}; its labels are {', '.join(model.model_info.labels) or 'none'}"
            if wrong
            else ""
        )
    if not model.gives_embeddings:
        return (
            "does not support embeddings or scores"
            if isinstance(step, RerankStepConfig)
            else "does not support embeddings"
        )
    keeps_vectors = isinstance(step, RouteStepConfig) or (isinstance(step, EmbedStepConfig) and step.index is not None)
    return "is an adapter, which may change after its vectors are stored" if model.parent and keeps_vectors else ""
