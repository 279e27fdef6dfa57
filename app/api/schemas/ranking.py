"""The typed requests that compare texts: /v1/rerank and /v1/score."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from app.api.schemas.fields import Documents, NonEmpty, NumSamples, NumTokens, Texts
from app.api.schemas.requests import QueuedRequest


def _not_empty(value: Any) -> Any:
    if value == []:
        raise ValueError("should hold at least one text")
    return value


class RankingRequest(QueuedRequest):
    """What the two endpoints have in common."""

    max_tokens_per_doc: NumTokens | None = None  # a longer document is cut, also to what the model has room for

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """The texts that are compared: each of the first, or the only one, with one of the second."""
        raise NotImplementedError

    def encoded_size(self, size: int) -> int:
        """A text that is compared with many is part of as many pairs."""
        firsts, seconds = self.sides
        return size + (len(firsts[0]) * len(seconds) if len(firsts) == 1 else 0)


class RerankRequest(RankingRequest):
    """The body of POST /v1/rerank."""

    query: NonEmpty
    documents: Annotated[Documents, Field(min_length=1), BeforeValidator(_not_empty)]
    top_n: NumSamples | None = None
    return_documents: bool = False

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        return [self.query], self.documents


class ScoreRequest(RankingRequest):
    """The body of POST /v1/score: one text against many, or texts pair by pair."""

    text_1: Texts
    text_2: Texts

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        return self.text_1, self.text_2
