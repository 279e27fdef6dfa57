"""A small model answers where it was confident, else a large one.

Confidence is the mean log-probability of the small model's tokens, over all choices of a call. Nothing of the small
model's output is sent before it is known. (The idea is that of FrugalGPT, Chen et al., 2023, with the small
model as its own judge.)
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from app.api.pipelines.run import PendingAnswer, PipelineRun, Target

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeStep:
    """Two models or pipelines, and the confidence that the small one needs."""

    name: str
    small: Target
    large: Target
    min_mean_logprob: float
    kind: str = "cascade"

    @property
    def targets(self) -> tuple[Target, ...]:
        """What may answer."""
        return self.small, self.large

    async def answer(self, run: PipelineRun) -> PendingAnswer:
        """Run the small one and decide. The large one has not begun then. Raises what the small one's run raises."""
        small = await run.judged().prepared(self.small, self)
        large = await run.prepared(self.large, self)
        tried = await (await small()).read()
        is_sure = tried.mean_logprob >= self.min_mean_logprob
        tried.decided(is_sure=is_sure)
        logger.info("%s: mean logprob %.3f, %s", self.name, tried.mean_logprob, "sure" if is_sure else "not sure")
        return run.again(tried) if is_sure else await large()
