"""Two models under one name: the small one answers, and the large one where the small one was not sure.

How sure: the mean of its tokens' log-probabilities, over all choices of a call. Nothing of the small model's answer
goes out before that is known. (The idea is that of FrugalGPT, Chen et al., 2023, with the small
model as its own judge.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from app.api.auth.limits import Account
from app.api.call import Call, ServedModel
from app.api.output.choices import ChoiceDelta, generate_choices
from app.api.output.completion_writers import Json, Progress
from app.api.output.token_details import LEAST_LOGPROB
from app.engine.request import Generate, Request, TokenDelta
from app.errors import DeadlineMissed
from app.metrics import NO_MODEL, CallMetrics, RequestMetrics

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cascade:
    """Which two models, and how sure the small one has to be."""

    name: str
    small: ServedModel
    large: ServedModel
    min_mean_logprob: float

    def is_for(self, account: Account) -> bool:
        """Whether both models are."""
        return account.may_use(self.small.name) and account.may_use(self.large.name)

    def check_account(self, account: Account) -> None:
        """Raises NotPermitted where one of the models is not."""
        account.check_model(self.small.name)
        account.check_model(self.large.name)

    def entry(self) -> Json:
        """What /v1/models says of it."""
        entry = self.small.entry(self.name)
        return entry | {"max_model_len": min(entry["max_model_len"], self.large.facts.max_model_len)}


@dataclass(frozen=True, slots=True, kw_only=True)
class CascadeDecision:
    """Who answers a call on a cascade."""

    call: Call
    pieces: AsyncGenerator[ChoiceDelta, None]
    is_small: bool
    mean_logprob: float  # of the small model's answer
    num_small_tokens: int  # that it generated
    num_discarded_tokens: int  # of its prompt and answer, where another answer goes out

    def report(self) -> Json:
        """What `usage` says of it, beside the numbers of the model that answers."""
        return {
            "answered_by": self.call.model.name,
            "mean_logprob": self.mean_logprob,
            "small_completion_tokens": self.num_small_tokens,
        }

    def progress(self, request_id: str, metrics: RequestMetrics, *, arrived_at: float) -> Progress:
        """Of the answer. That of the small model is measured already, and only said again."""
        measuring = RequestMetrics() if self.is_small else metrics
        name = NO_MODEL if self.is_small else self.call.model.name
        prompt_tokens = [len(request.prompt_token_ids) for request in self.call.requests]
        progress = Progress(self.call, request_id, measuring.model(name).call(prompt_tokens, arrived_at=arrived_at))
        progress.extra_usage = {"cascade": self.report()}
        return progress

    def headers(self) -> dict[str, str]:
        return {
            "x-carousel-cascade-model": self.call.model.name,
            "x-carousel-cascade-logprob": f"{self.mean_logprob:.4f}",
        }


async def judge(cascade: Cascade, small: Call, large: Call, metrics: CallMetrics) -> CascadeDecision:
    """Have the small model answer, and say whose answer it will be; the large model has not begun then.

    `metrics` are the small call's. Raises what the small model's generation raises, and DeadlineMissed.
    """
    began_at = asyncio.get_running_loop().time()
    confidence = _Confidence(small.model.generate)
    pieces = await _all_pieces(replace(small, model=replace(small.model, generate=confidence.generate)), metrics)
    is_small = confidence.mean_logprob >= cascade.min_mean_logprob
    if is_small:
        call, answer = small, _again(pieces)
    else:
        call = _hurried(large, asyncio.get_running_loop().time() - began_at)
        answer = generate_choices(call)
    logger.info("cascade %s: mean logprob %.3f, %s answers", cascade.name, confidence.mean_logprob, call.model.name)
    num_tokens = sum(piece.num_tokens for piece in pieces)
    return CascadeDecision(
        call=call,
        pieces=answer,
        is_small=is_small,
        mean_logprob=confidence.mean_logprob,
        num_small_tokens=num_tokens,
        num_discarded_tokens=0 if is_small else small.num_prompt_tokens + num_tokens,
    )


async def _all_pieces(call: Call, metrics: CallMetrics) -> list[ChoiceDelta]:
    pieces: list[ChoiceDelta] = []
    with metrics:
        async with aclosing(generate_choices(call)) as generated:
            async for piece in generated:
                pieces.append(piece)
                if piece.num_tokens:
                    metrics.tokens(piece.index, piece.num_tokens)
                if piece.measured_reason is not None:
                    metrics.finished(piece.index, piece.measured_reason)
    return pieces


async def _again(pieces: Sequence[ChoiceDelta]) -> AsyncGenerator[ChoiceDelta, None]:
    for piece in pieces:
        yield piece


def _hurried(call: Call, elapsed_s: float) -> Call:
    """The call with so much less time until its deadline. Raises DeadlineMissed when none is left."""
    deadlines = [request.deadline_s for request in call.requests if request.deadline_s is not None]
    if not deadlines:
        return call
    if min(deadlines) <= elapsed_s:
        raise DeadlineMissed(f"the deadline of {min(deadlines):g} s has passed while the small model answered")
    return replace(
        call,
        requests=tuple(
            replace(request, deadline_s=None if request.deadline_s is None else request.deadline_s - elapsed_s)
            for request in call.requests
        ),
    )


class _Confidence:
    """How likely a model found what it generated, for all requests that it is asked for here."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._sum = 0.0
        self._num_tokens = 0

    @property
    def mean_logprob(self) -> float:
        """0, which is certainty, for a model that generated nothing."""
        return self._sum / self._num_tokens if self._num_tokens else 0.0

    async def generate(self, request: Request) -> AsyncIterator[TokenDelta]:
        """As the model, which is asked for log-probabilities even if the caller does not want any."""
        if request.sampling.logprobs is None:
            request = replace(request, sampling=replace(request.sampling, logprobs=0))
        deltas = self._generate(request)
        try:
            async for delta in deltas:
                self._sum += sum([max(each.logprob, LEAST_LOGPROB) for each in delta.logprobs])
                self._num_tokens += len(delta.logprobs)
                yield delta
        finally:
            aclose = getattr(deltas, "aclose", None)  # generators have it; other iterators need none
            if aclose is not None:
                await aclose()
