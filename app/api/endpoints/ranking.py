"""POST /v1/rerank and /v1/score: scores of how well texts match another text.

For a cross-encoder, each pair becomes one request. For any other model, each text becomes a request for an embedding,
and the score of a pair is the cosine of its two vectors.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Literal, NotRequired

import numpy as np
from typing_extensions import TypedDict

from app.api.endpoints.embeddings import first_numbers, vectors_of
from app.api.endpoints.endpoint import Endpoint
from app.api.generation import check_call_tokens, check_texts, prepare_pooling
from app.api.output.readouts import ListOfRows, PromptUsage, ReadoutWriter, Vector, prompt_usage, results_of
from app.api.output.response_state import ResponseState
from app.api.prepared_request import PreparedRequest, RequestLimits, ServedModel
from app.api.request_context import RequestContext
from app.api.schemas.ranking import RankingRequest, RerankRequest, ScoreRequest
from app.engine.request import ModelInfo, Pooling
from app.errors import ContextTooLong, Failure, InvalidRequest
from app.json_pieces import Json, Rows
from app.text.text_pairs import EncodedText


def prepare_rerank(body: RerankRequest, model: ServedModel, context: RequestContext) -> PreparedRequest:
    """Check and tokenize a query and its documents. Raises InvalidRequest."""
    return _prepared(_Comparison(body, model, body.side_params, *body.sides), "rerank-", context)


def prepare_score(body: ScoreRequest, model: ServedModel, context: RequestContext) -> PreparedRequest:
    """Check and tokenize the texts on both sides. Raises InvalidRequest."""
    (firsts, seconds), (first, second) = body.sides, body.side_params
    if len(firsts) not in (1, len(seconds)):
        raise InvalidRequest(
            f"`{first}` contains {len(firsts):,} texts and `{second}` contains {len(seconds):,}; send only one text in "
            f"`{first}`, or the same number in both",
            param=first,
        )
    return _prepared(_Comparison(body, model, (first, second), firsts, seconds), "score-", context)


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Pairs each text in `seconds` with the text in `firsts` at the same index, or with the only text in `firsts`."""

    body: RankingRequest
    model: ServedModel
    params: tuple[str, str]  # the names of the two sides' fields
    firsts: Sequence[str]
    seconds: Sequence[str]

    def check(self, limits: RequestLimits) -> None:
        """Raise InvalidRequest for mistakes that can be found before the texts are encoded."""
        model_info, (_, param) = self.model.model_info, self.params
        if not (model_info.scores_pairs or self.model.gives_embeddings):
            raise InvalidRequest(
                f"the model {self.model.name!r} does not support scores; choose another model", param="model"
            )
        if len(self.seconds) > limits.max_inputs:
            raise InvalidRequest(
                f"`{param}` contains {len(self.seconds):,} texts; this server accepts at most {limits.max_inputs:,} in "
                f"one call; send fewer",
                param=param,
            )
        for texts, name in ((self.firsts, self.params[0]), (self.seconds, param)):
            is_cut = self._cuts_seconds if name == param else self._cuts_firsts
            check_texts(texts, self.model, name, may_exceed_context=is_cut)

    @property
    def _cuts_firsts(self) -> bool:
        """Whether texts of the first side may be truncated. In a cross-encoder's pair, only the second text may."""
        return self.body.truncate_prompt_tokens is not None and not self.model.model_info.scores_pairs

    @property
    def _cuts_seconds(self) -> bool:
        return bool(self.body.max_tokens_per_doc) or self.body.truncate_prompt_tokens is not None

    @property
    def _longest(self) -> int:
        """The maximum number of tokens in a text or a pair."""
        asked, longest = self.body.truncate_prompt_tokens, self.model.model_info.max_model_len
        return longest if asked in (None, -1) else min(asked, longest)

    def prompts(self) -> list[EncodedText]:
        """Return the tokens of each request. Raises InvalidRequest if one call may not have this many."""
        tokenizer, longest = self.model.tokenizer, self._longest
        most = (self.body.max_tokens_per_doc or longest) if self._cuts_seconds else None
        if self.model.model_info.scores_pairs:
            texts = [tokenizer.pairs(self.firsts, self.seconds, max_second=most, longest=longest)]
        else:
            texts = [
                tokenizer.texts(self.firsts, max_tokens=longest if self._cuts_firsts else None, longest=longest),
                tokenizer.texts(self.seconds, max_tokens=most, longest=longest),
            ]
        # Every pair repeats the query, so a small body could ask for gigabytes of tokens.
        what = (
            f"the pairs of `{'` and `'.join(self.params)}`"
            if self.model.model_info.scores_pairs
            else " and ".join(self.params)
        )
        check_call_tokens(sum(each.num_tokens for each in texts), self.model, what, self.params[1])
        return [text for each in texts for text in each.encoded()]

    def check_lengths(self, prompts: Sequence[EncodedText]) -> None:
        """Raise InvalidRequest for a prompt that is empty or too long for the model."""
        longest, is_asked = self._longest, self._longest < self.model.model_info.max_model_len
        for index, prompt in enumerate(prompts):
            is_first = not self.model.model_info.scores_pairs and index < len(self.firsts)
            param = self.params[0] if is_first else self.params[1]
            if not prompt.token_ids:
                raise InvalidRequest(
                    f"`{param}` contains a text without tokens; each text must have at least one token", param=param
                )
            if len(prompt.token_ids) > longest:
                what = (
                    f"a pair of `{'` and `'.join(self.params)}`"
                    if self.model.model_info.scores_pairs
                    else f"a text in `{param}`"
                )
                allowed = (
                    f"truncate_prompt_tokens is {longest:,}" if is_asked else f"this model accepts at most {longest:,}"
                )
                raise ContextTooLong(
                    f"{what} has {len(prompt.token_ids):,} tokens; {allowed}; shorten it"
                    + ("" if is_first or self._cuts_seconds else ", or send max_tokens_per_doc to truncate it"),
                    param=param,
                )


def _prepared(comparison: _Comparison, prefix: str, context: RequestContext) -> PreparedRequest:
    comparison.check(context.limits)
    prompts = comparison.prompts()
    comparison.check_lengths(prompts)
    model = comparison.model
    pooling = model.pooling
    if model.model_info.scores_pairs:
        pooling = Pooling.SCORE if comparison.body.is_activated else Pooling.LOGIT
    return prepare_pooling(prefix, comparison.body, model, context, prompts, pooling)


async def best_documents(number: int, top_n: int | None, state: ResponseState) -> list[tuple[int, float]]:
    """Wait for the scores of `number` documents, and return index and score of the `top_n` best, the best first."""
    scores = await _scores(state, num_firsts=1, num_pairs=number)
    state.log_end()
    return _best(scores, top_n)


def _best(scores: Sequence[float], top_n: int | None) -> list[tuple[int, float]]:
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[:top_n]
    return [(index, scores[index]) for index in best]


async def _scores(state: ResponseState, *, num_firsts: int, num_pairs: int) -> list[float]:
    """Wait for all requests of a call and return the scores of its pairs."""
    if state.prepared.model.model_info.scores_pairs:
        return await results_of(state, _score)
    scores: list[float] = []
    for score in _cosines(await vectors_of(state), num_firsts, num_pairs):
        scores.append(score)
        cosines_at_once = 64  # computed in a millisecond
        if len(scores) % cosines_at_once == 0:
            await asyncio.sleep(0)
    return scores


def _score(pair: int, numbers: Vector) -> float:
    """Return the score of a pair from the output of a cross-encoder. Raises Failure if the score is not finite."""
    [score] = numbers.tolist()
    if not math.isfinite(score):
        raise Failure(f"the score for the pair with index {pair} is not finite: {score}")
    return float(score)


def _cosines(vectors: Sequence[Vector], num_firsts: int, num_pairs: int) -> Iterator[float]:
    """Yield the cosine of each pair of vectors, which have length 1. `vectors` starts with the first side's."""
    firsts = repeat(vectors[0], num_pairs) if num_firsts == 1 else vectors[:num_firsts]
    for first, second in zip(firsts, vectors[num_firsts:], strict=True):
        yield float(first.astype(np.float64) @ second.astype(np.float64))


class _RankingWriter(ReadoutWriter[float]):
    """Writes the scores of pairs as rows."""

    is_one_row = False
    body: RankingRequest

    async def values(self, state: ResponseState) -> list[float]:
        firsts, seconds = self.body.sides
        return await _scores(state, num_firsts=len(firsts), num_pairs=len(seconds))

    def values_of(self, numbers: Sequence[Vector], model_info: ModelInfo) -> list[float]:
        if model_info.scores_pairs:
            return [_score(pair, each) for pair, each in enumerate(numbers)]
        firsts, seconds = self.body.sides
        return list(_cosines([first_numbers(each, None) for each in numbers], len(firsts), len(seconds)))


class RankedDocument(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[dict[Literal["text"], str]]


class Rerank(TypedDict):
    id: str
    object: Literal["list"]
    model: str
    results: Rows[RankedDocument]
    meta: Json
    usage: PromptUsage


@dataclass(frozen=True, slots=True)
class RerankWriter(_RankingWriter):
    """Writes documents in the order of their scores."""

    body: RerankRequest

    def rows(self, values: Sequence[float], model_info: ModelInfo) -> Rows[RankedDocument]:
        best = _best(values, self.body.top_n or None)
        return Rows(lambda: ([self._row(index, score)] for index, score in best))

    def response(self, state: ResponseState, rows: Rows[RankedDocument]) -> Rerank:
        usage = prompt_usage(state)
        return {
            "id": state.prepared.response_id,
            "object": "list",
            "model": state.prepared.model.name,
            "results": rows,
            "meta": {
                "api_version": {"version": "2"},
                "billed_units": {"search_units": 1},
                "tokens": {"input_tokens": usage["prompt_tokens"]},
            },
            "usage": usage,
        }

    def _row(self, index: int, score: float) -> RankedDocument:
        row: RankedDocument = {"index": index, "relevance_score": score}
        if self.body.return_documents:
            row["document"] = {"text": self.body.documents[index]}
        return row


class PairScore(TypedDict):
    index: int
    object: Literal["score"]
    score: float


class Scores(ListOfRows):
    data: Rows[PairScore]


@dataclass(frozen=True, slots=True)
class ScoreWriter(_RankingWriter):
    """Writes the score of each pair, in vLLM's format."""

    body: ScoreRequest

    def rows(self, values: Sequence[float], model_info: ModelInfo) -> Rows[PairScore]:
        return Rows.of(range(len(values)), lambda some: [_pair_score(index, values[index]) for index in some])


def _pair_score(index: int, score: float) -> PairScore:
    return {"index": index, "object": "score", "score": score}


RERANK = Endpoint(
    "/v1/rerank",
    RerankRequest,
    prepare_rerank,
    RerankWriter,
    summary="Sort documents by their relevance to a query",
    response=Rerank,
    check_bulk=lambda _: None,  # all rows of an item are one text
    aliases=("/v2/rerank", "/rerank"),  # the paths for clients of Cohere, and of vLLM, SGLang and TEI
)


SCORE = Endpoint(
    "/v1/score",
    ScoreRequest,
    prepare_score,
    ScoreWriter,
    summary="Score how well texts match another text",
    response=Scores,
    check_bulk=lambda _: None,  # all rows of an item are one text
    aliases=("/score",),  # the path for vLLM's clients
)
