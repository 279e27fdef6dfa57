"""The first case that a request fits says which model answers, before anything of the answer is queued."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import mul
from typing import Protocol

from app.api.pipelines.run import PendingAnswer, PipelineRun, Target
from app.api.pipelines.vectors import own_vectors, question_scores, question_vector
from app.api.prepared_request import ServedModel
from app.errors import ContextTooLong


class Chooser(Protocol):
    """Which case a request takes, by its index; notes in the run why."""

    async def choose(self, run: PipelineRun, step: RouteStep) -> int: ...


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
        return (self.chooser.model,) if isinstance(self.chooser, ByExample | ByLabel) else ()

    async def answer(self, run: PipelineRun) -> PendingAnswer:
        """Choose, then as the case's target answers."""
        case = self.cases[await self.chooser.choose(run, self)]
        start = await (run.with_preset(case.preset) if case.preset else run).prepared(case.target, self)
        return await start()


@dataclass(frozen=True, slots=True)
class ByLength:
    """The first case with room for the prompt; a model that cannot hold prompt and output has none."""

    max_prompt_tokens: Sequence[int]  # of all cases but the last

    async def choose(self, run: PipelineRun, step: RouteStep) -> int:
        for index, most in enumerate(self.max_prompt_tokens):
            target = step.cases[index].target
            model = target if isinstance(target, ServedModel) else target.answering_models[0]
            try:
                num_tokens = (await run.request_for(model, reserves=False)).num_prompt_tokens
            except ContextTooLong:
                continue
            if num_tokens <= most:
                run.note(step, case=index, num_prompt_tokens=num_tokens)
                return index
        last = len(step.cases) - 1
        run.note(step, case=last)
        return last


@dataclass(frozen=True, slots=True)
class ByHeader:
    """The first case that has the value of a header."""

    header: str
    values: Sequence[Sequence[str]]  # of all cases but the last

    async def choose(self, run: PipelineRun, step: RouteStep) -> int:
        given = run.context.headers.get(self.header, "").strip()
        chosen = next((index for index, values in enumerate(self.values) if given in values), len(self.values))
        run.note(step, case=chosen)
        return chosen


@dataclass(frozen=True, slots=True)
class ByLabel:
    """The first case that names the label with the highest score for the last text of the user."""

    model: ServedModel
    labels: Sequence[Sequence[str]]  # of all cases but the last

    async def choose(self, run: PipelineRun, step: RouteStep) -> int:
        scores = await question_scores(run, self.model, step)
        best = max(range(len(scores)), key=scores.__getitem__)
        label = self.model.facts.labels[best]
        chosen = next((index for index, labels in enumerate(self.labels) if label in labels), len(self.labels))
        run.reports[-1].end(case=chosen, label=label, score=scores[best])
        return chosen


@dataclass(slots=True)
class ByExample:
    """The case with the example that the last text of the user is nearest to, by the cosine of their embeddings.

    The vectors of the examples are computed once.
    """

    model: ServedModel
    examples: Sequence[Sequence[str]]  # of all cases
    _vectors: list[array[float]] = field(default_factory=list)  # of all examples, one after the other
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def choose(self, run: PipelineRun, step: RouteStep) -> int:
        question = await question_vector(run, self.model, step)
        cases = [index for index, examples in enumerate(self.examples) for _ in examples]
        cosines = [sum(map(mul, question, vector)) for vector in await self._of_examples()]
        best = max(range(len(cases)), key=cosines.__getitem__)
        run.reports[-1].end(case=cases[best], score=cosines[best])
        return cases[best]

    async def _of_examples(self) -> list[array[float]]:
        async with self._lock:
            if not self._vectors:
                texts = [text for examples in self.examples for text in examples]
                self._vectors = await own_vectors(texts, self.model, is_background=False)
        return self._vectors
