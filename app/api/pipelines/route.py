"""The first case that a request fits says which model answers, before anything of the answer is queued."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from app.api.endpoints.decisions import label_logprobs
from app.api.endpoints.table import ENDPOINTS
from app.api.pipelines.run import PendingAnswer, PipelineRun, StepReport, Target
from app.api.pipelines.vectors import Matrix, cosines, own_vectors, question_scores, question_vector
from app.api.prepared_request import PreparedRequest, ServedModel
from app.api.schemas.decisions import Choice, Option
from app.errors import ContextTooLong


class Chosen(NamedTuple):
    """The case that a request takes."""

    case: int
    report: StepReport  # which says why
    prepared: PreparedRequest | None = None  # what its model would be asked, where that is known by now


class Chooser(Protocol):
    """Chooses among the cases of a route."""

    async def choose(self, run: PipelineRun, step: RouteStep) -> Chosen: ...


@dataclass(frozen=True, slots=True)
class RouteCase:
    """What answers, on replicas with which preset."""

    target: Target
    preset: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteStep:
    """Cases, and what chooses among them."""

    name: str
    cases: tuple[RouteCase, ...]
    chooser: Chooser
    kind: str = "route"

    @property
    def targets(self) -> tuple[Target, ...]:
        return tuple(case.target for case in self.cases)

    @property
    def others(self) -> tuple[ServedModel, ...]:
        """Models that run and do not answer."""
        return (self.chooser.model,) if isinstance(self.chooser, ByExample | ByLabel | ByDecision) else ()

    async def answer(self, run: PipelineRun) -> PendingAnswer:
        """Choose, then as the case's target answers."""
        chosen = await self.chooser.choose(run, self)
        case, run = self.cases[chosen.case], run.behind(chosen.report)
        if case.preset:
            start = await run.with_preset(case.preset).prepared(case.target, self)
        else:
            start = await run.prepared(case.target, self, known=chosen.prepared)
        return await start()


@dataclass(frozen=True, slots=True)
class ByLength:
    """The first case with room for the prompt; a model that cannot hold prompt and output has none."""

    max_prompt_tokens: Sequence[int]  # of all cases but the last

    async def choose(self, run: PipelineRun, step: RouteStep) -> Chosen:
        known: dict[str, PreparedRequest | None] = {}  # by the model's name; None: it cannot hold the request
        for index, most in enumerate(self.max_prompt_tokens):
            target = step.cases[index].target
            model = target if isinstance(target, ServedModel) else target.answering_models[0]
            if model.name not in known:
                known[model.name] = await _fitting(run, model)
            prepared = known[model.name]
            if prepared is not None and prepared.num_prompt_tokens <= most:
                report = run.note(step, case=index, num_prompt_tokens=prepared.num_prompt_tokens)
                return Chosen(index, report, prepared)
        last = len(step.cases) - 1
        return Chosen(last, run.note(step, case=last))


async def _fitting(run: PipelineRun, model: ServedModel) -> PreparedRequest | None:
    try:
        return await run.request_for(model, reserves=False)
    except ContextTooLong:
        return None


@dataclass(frozen=True, slots=True)
class ByHeader:
    """The first case that has the value of a header."""

    header: str
    values: Sequence[Sequence[str]]  # of all cases but the last

    async def choose(self, run: PipelineRun, step: RouteStep) -> Chosen:
        given = run.context.headers.get(self.header, "").strip()
        chosen = next((index for index, values in enumerate(self.values) if given in values), len(self.values))
        return Chosen(chosen, run.note(step, case=chosen))


@dataclass(frozen=True, slots=True)
class ByLabel:
    """The first case that names the label with the highest score for the last text of the user."""

    model: ServedModel
    labels: Sequence[Sequence[str]]  # of all cases but the last

    async def choose(self, run: PipelineRun, step: RouteStep) -> Chosen:
        scores, report = await question_scores(run, self.model, step)
        best = int(scores.argmax())
        label = self.model.facts.labels[best]
        chosen = next((index for index, labels in enumerate(self.labels) if label in labels), len(self.labels))
        report.end(case=chosen, label=label, score=float(scores[best]))
        return Chosen(chosen, report)


@dataclass(frozen=True, slots=True)
class ByDecision:
    """The case with the description that a model chooses for the last text of the user."""

    model: ServedModel
    descriptions: Sequence[str]  # of all cases

    async def choose(self, run: PipelineRun, step: RouteStep) -> Chosen:
        question = Choice(
            type="choice",
            instructions="What is this text?",
            choices=[Option(value=each) for each in self.descriptions],
        )
        prepared = await run.request_aside(
            ENDPOINTS["/v1/decisions"], self.model, question_param="input", input=run.question, questions=[question]
        )
        report = run.begin(prepared, step)
        [logprobs] = await label_logprobs(report.state)
        best = logprobs.index(max(logprobs))
        report.end(case=best, confidence=math.exp(max(logprobs)))
        return Chosen(best, report)


@dataclass(slots=True)
class ByExample:
    """The case with the example that the last text of the user is nearest to, by the cosine of their embeddings.

    The vectors of the examples are computed once.
    """

    model: ServedModel
    examples: Sequence[Sequence[str]]  # of all cases
    _vectors: Matrix | None = None  # of all examples: [num_examples, embedding_size]
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def choose(self, run: PipelineRun, step: RouteStep) -> Chosen:
        question, report = await question_vector(run, self.model, step)
        cases = [index for index, examples in enumerate(self.examples) for _ in examples]
        scores = await cosines(await self._of_examples(), question)
        best = int(scores.argmax())
        report.end(case=cases[best], score=float(scores[best]))
        return Chosen(cases[best], report)

    async def _of_examples(self) -> Matrix:
        async with self._lock:
            if self._vectors is None:
                texts = [text for examples in self.examples for text in examples]
                vectors = await own_vectors(texts, self.model, is_background=False)
                self._vectors = await asyncio.to_thread(np.stack, vectors)
        return self._vectors
