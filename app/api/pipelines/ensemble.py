"""Several models answer, and one of their answers is chosen once all have ended."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from app.api.pipelines.run import PendingAnswer, PipelineRun, ReadAnswer, Target
from app.metrics import task_name


@dataclass(frozen=True, slots=True, kw_only=True)
class EnsembleStep:
    """Models or pipelines that all answer."""

    name: str
    targets: tuple[Target, ...]
    choose: Literal["vote", "logprob"]
    kind: str = "ensemble"

    async def answer(self, run: PipelineRun) -> PendingAnswer:
        """Run all and choose. The first error of any ends the others and is raised."""
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
