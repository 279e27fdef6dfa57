"""The typed requests that compare texts: /v1/rerank and /v1/score."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from app.api.schemas.fields import Documents, Natural, NonEmpty, Texts, TokenBudget
from app.api.schemas.requests import ReadoutRequest
from app.errors import InvalidRequest


def _not_empty(value: Any) -> Any:
    if value == []:
        raise ValueError("should contain at least one text")
    return value


class RankingRequest(ReadoutRequest):
    """The fields that /v1/rerank and /v1/score share."""

    max_tokens_per_doc: TokenBudget | None = None  # documents are truncated to this length and to the model's context
    raw_scores: bool = False  # TEI's name for `use_activation: false`

    @property
    def is_activated(self) -> bool:
        return super().is_activated and not self.raw_scores

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        """The two lists of texts to compare: pair by pair, or a single first text with each second text."""
        raise NotImplementedError

    @property
    def side_params(self) -> tuple[str, str]:
        """The names of the two sides' fields."""
        raise NotImplementedError

    def encoded_size(self, size: int) -> int:
        """Return the number of characters to encode. A text that is compared with many texts counts in each pair."""
        firsts, seconds = self.sides
        return size + (len(firsts[0]) * len(seconds) if len(firsts) == 1 else 0)


class RerankRequest(RankingRequest):
    """The body of POST /v1/rerank."""

    query: NonEmpty
    documents: Annotated[Documents, Field(min_length=1), BeforeValidator(_not_empty)]
    top_n: Natural | None = None  # 0 means all, as in vLLM
    return_documents: bool = False

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        return [self.query], self.documents

    @property
    def side_params(self) -> tuple[str, str]:
        return "query", "documents"


# vLLM's names for each side of /v1/score.
_FIRSTS = ("text_1", "queries", "data_1")
_SECONDS = ("text_2", "documents", "items", "data_2")


class ScoreRequest(RankingRequest):
    """The body of POST /v1/score: one text against many, or texts pair by pair. Send each side under one name."""

    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [{"oneOf": [{"required": [name]} for name in names]} for names in (_FIRSTS, _SECONDS)]
        }
    )

    text_1: Texts | None = None
    queries: Texts | None = None
    data_1: Texts | None = None
    text_2: Texts | None = None
    documents: Texts | None = None
    items: Texts | None = None
    data_2: Texts | None = None

    @model_validator(mode="after")
    def _each_side_has_one_name(self) -> ScoreRequest:
        for names in (_FIRSTS, _SECONDS):
            given = [name for name in names if getattr(self, name) is not None]
            if not given:
                raise InvalidRequest(f"{names[0]} is required", param=names[0])
            if len(given) > 1:
                raise InvalidRequest(
                    f"`{'` and `'.join(given)}` are names of the same field; send only one of them", param=given[1]
                )
        return self

    @property
    def side_params(self) -> tuple[str, str]:
        first, second = (
            next(name for name in names if getattr(self, name) is not None) for names in (_FIRSTS, _SECONDS)
        )
        return first, second

    @property
    def sides(self) -> tuple[list[str], list[str]]:
        first, second = self.side_params
        return getattr(self, first), getattr(self, second)
