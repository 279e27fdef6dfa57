"""Route steps choose which model or pipeline answers a request, before any part of the answer is queued."""

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
from app.api.pipelines.vectors import Matrix, cosines, question_scores, question_vector, service_vectors
from app.api.prepared_request import PreparedRequest, ServedModel
from app.api.schemas.decisions import Choice, Option
from app.errors import ContextTooLong


class Chosen(NamedTuple):
    """The case that was chosen for a request."""

    case: int
    report: StepReport  # explains why the case was chosen
    prepared: PreparedRequest | None = None  # the request to the case's model, if the chooser has prepared it


class Chooser(Protocol):
    """Chooses among the cases of a route."""

    async def choose(self, run: PipelineRun, step: RouteStep) -> Chosen: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteStep:
    """Chooses one of several cases, whose target then answers."""

    name: str
    targets: tuple[Target, ...]  # the model or pipeline of each case
    chooser: Chooser
    kind: str = "route"

    @property
    def others(self) -> tuple[ServedModel, ...]:
        """The models that only help to choose a case."""
        return (self.chooser.model,) if isinstance(self.chooser, ByExample | ByLabel | ByDecision) else ()

    async def answer(self, run: PipelineRun) -> PendingAnswer:
        """Choose a case and return the answer of its target."""
        chosen = await self.chooser.choose(run, self)
        run = run.behind(chosen.report)
        start = await run.prepared(self.targets[chosen.case], self, known=chosen.prepared)
        return await start()


@dataclass(frozen=True, slots=True)
class ByLength:
    """Chooses the first case whose token limit and model context can hold the prompt, or the last case if none can."""

    max_prompt_tokens: Sequence[int]  # one for each case but the last

    async def choose(self, run: PipelineRun, step: RouteStep) -> Chosen:
        known: dict[str, PreparedRequest | None] = {}  # by the model's name; None if its context is too short
        for index, most in enumerate(self.max_prompt_tokens):
            target = step.targets[index]
            model = target if isinstance(target, ServedModel) else target.answering_models[0]
            if model.name not in known:
                known[model.name] = await _fitting(run, model)
            prepared = known[model.name]
            if prepared is not None and prepared.num_prompt_tokens <= most:
                report = run.note(step, case=index, num_prompt_tokens=prepared.num_prompt_tokens)
                return Chosen(index, report, prepared)
        last = len(step.targets) - 1
        return Chosen(last, run.note(step, case=last))


async def _fitting(run: PipelineRun, model: ServedModel) -> PreparedRequest | None:
    try:
        return await run.request_for(model, reserves=False)
    except ContextTooLong:
        return None


@dataclass(frozen=True, slots=True)
class ByHeader:
    """Chooses the first case that lists the value of a header, or the last case if none does."""

    header: str
    values: Sequence[Sequence[str]]  # for each case but the last

    async def choose(self, run: PipelineRun, step: RouteStep) -> Chosen:
        given = run.context.headers.get(self.header, "").strip()
        chosen = next((index for index, values in enumerate(self.values) if given in values), len(self.values))
        return Chosen(chosen, run.note(step, case=chosen))


@dataclass(frozen=True, slots=True)
class ByLabel:
    """Chooses the first case that lists the best label of the user's last text, or the last case if none lists it."""

    model: ServedModel
    labels: Sequence[Sequence[str]]  # for each case but the last

    async def choose(self, run: PipelineRun, step: RouteStep) -> Chosen:
        scores, report = await question_scores(run, self.model, step)
        best = int(scores.argmax())
        label = self.model.model_info.labels[best]
        chosen = next((index for index, labels in enumerate(self.labels) if label in labels), len(self.labels))
        report.end(case=chosen, label=label, score=float(scores[best]))
        return Chosen(chosen, report)


@dataclass(frozen=True, slots=True)
class ByDecision:
    """Lets a model choose the case whose description fits the user's last text best."""

    model: ServedModel
    descriptions: Sequence[str]  # one for each case

    async def choose(self, run: PipelineRun, step: RouteStep) -> Chosen:
        question = Choice(
            type="choice",
            instructions="What is this text?",
            choices=[Option(value=each) for each in self.descriptions],
        )
        prepared = await run.request_aside(
            ENDPOINTS["/v1/decisions"], self.model, question_param="input", input=run.question, questions=[question]
        )
        state, report = run.begin(prepared, step)
        [logprobs] = await label_logprobs(state)
        best = logprobs.index(max(logprobs))
        report.end(case=best, confidence=math.exp(max(logprobs)))
        return Chosen(best, report)


@dataclass(slots=True)
class ByExample:
    """Chooses the case with the example that is nearest to the user's last text, by the cosine of their embeddings.

    The first request computes the vectors of the examples.
    """

    model: ServedModel
    examples: Sequence[Sequence[str]]  # for each case
    _vectors: Matrix | None = None  # all examples: [num_examples, embedding_size]
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
                vectors = await service_vectors(texts, self.model, is_background=False)
                self._vectors = await asyncio.to_thread(np.stack, vectors)
        return self._vectors
