"""Pipeline steps that generate answers, and the rerank step. Route and index steps are in other modules."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from app.api.endpoints.ranking import best_documents
from app.api.endpoints.table import ENDPOINTS
from app.api.pipelines.run import PendingAnswer, PipelineRun, ReadAnswer, Target
from app.api.prepared_request import ServedModel
from app.api.schemas.requests import GenerationRequest
from app.errors import InvalidRequest
from app.metrics import task_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateStep:
    """Lets one model or pipeline answer."""

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
class CascadeStep:
    """A small model answers if it is confident; otherwise a large model answers.

    The confidence is the mean log-probability of the small model's tokens, over all choices of a request. No output of
    the small model is sent before the confidence is known. (The idea is from FrugalGPT, Chen et al., 2023; here the
    small model judges itself.)
    """

    name: str
    small: Target
    large: Target
    min_mean_logprob: float
    kind: str = "cascade"

    @property
    def targets(self) -> tuple[Target, ...]:
        return self.small, self.large

    async def answer(self, run: PipelineRun) -> PendingAnswer:
        """Run the small model, then decide whether to start the large model. Raises the errors of the small model."""
        small = await run.judged().prepared(self.small, self)
        large = await run.prepared(self.large, self)
        tried = await (await small()).read()
        is_sure = tried.mean_logprob >= self.min_mean_logprob
        tried.decided(is_sure=is_sure)
        logger.info("%s: mean logprob %.3f, %s", self.name, tried.mean_logprob, "sure" if is_sure else "not sure")
        return run.again(tried) if is_sure else (await large()).behind(tried.of.report)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleStep:
    """Lets all targets answer, and chooses the best answer by vote or by log-probability after all have finished."""

    name: str
    targets: tuple[Target, ...]
    choose: Literal["vote", "logprob"]
    kind: str = "ensemble"

    async def answer(self, run: PipelineRun) -> PendingAnswer:
        """Run all targets and choose an answer. The first error cancels the other targets and is raised."""
        judged = run.judged()
        starts = [await judged.prepared(target, self) for target in self.targets]
        answers = await _all_read(starts)
        votes = Counter(answer.texts for answer in answers)

        def rank(answer: ReadAnswer) -> tuple[int, float]:
            return (votes[answer.texts] if self.choose == "vote" else 0), answer.mean_logprob

        best = max(answers, key=rank)
        for answer in answers:
            answer.decided(votes=votes[answer.texts], is_chosen=answer is best)
        return run.again(best)


async def _all_read(starts: Sequence[Callable[[], Awaitable[PendingAnswer]]]) -> list[ReadAnswer]:
    async def read(start: Callable[[], Awaitable[PendingAnswer]]) -> ReadAnswer:
        return await (await start()).read()

    tasks = [asyncio.create_task(read(start), name=task_name()) for start in starts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RerankStep:
    """Keeps those of the request's documents that get the highest scores from a model."""

    name: str
    kind: str
    model: ServedModel
    top_n: int

    async def ranked(self, run: PipelineRun) -> PipelineRun:
        """Return the run with its `top_n` documents, best first. Raises InvalidRequest if the request has none."""
        body = run.body
        assert isinstance(body, GenerationRequest), "pipelines are for endpoints that generate"
        documents = body.documents
        if not documents:
            raise InvalidRequest(
                f"{body.model} ranks documents, but the request has none; send a list of texts in the field "
                "`documents`",
                param="documents",
            )
        prepared = await run.request_aside(
            ENDPOINTS["/v1/rerank"],
            self.model,
            question_param="query",
            query=run.question,
            documents=documents,
            top_n=self.top_n,
            max_tokens_per_doc=self.model.model_info.max_model_len,  # longer documents are truncated
        )
        state, report = run.begin(prepared, self)
        best = await best_documents(len(documents), self.top_n, state)
        sources = run.sources or [{"index": index} for index in range(len(documents))]
        kept = [sources[index] for index, _ in best]
        report.end(kept=[{**source, "score": score} for source, (_, score) in zip(kept, best, strict=True)])
        return run.behind(report).with_documents([documents[index] for index, _ in best], kept)
