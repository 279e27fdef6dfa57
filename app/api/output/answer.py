"""An answer whose deltas are still arriving: the output of each choice, and the usage.

An answer is either generated now (`ResponseState`) or read from its stored records (`StoredAnswer`). The writers of
responses and events use only their common base class `Answer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from io import StringIO
from typing import Literal

from typing_extensions import TypedDict

from app.api.output.choices import ChoiceDelta
from app.api.output.tool_calls import ToolCallDelta
from app.api.prepared_request import AnswerInfo
from app.json_pieces import Json


class GrowingText(StringIO):
    """A text that grows in pieces. Adding a piece copies only the piece, while a `str` would copy the whole text."""

    __slots__ = ()
    add = StringIO.write
    __str__ = StringIO.getvalue


class FunctionInput(TypedDict):
    name: str
    arguments: str


class FunctionCall(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionInput


class CustomInput(TypedDict):
    name: str
    input: str


class CustomCall(TypedDict):
    id: str
    type: Literal["custom"]
    custom: CustomInput


class MoreUsage(TypedDict, total=False):  # fields that OpenAI's API does not define
    pipeline: Json
    timings: dict[str, float]


class TokenUsage(MoreUsage):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class ResponsesUsage(MoreUsage):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


@dataclass(slots=True)
class ChoiceOutput:
    """The output of one choice so far."""

    text: GrowingText = field(default_factory=GrowingText)
    reasoning: GrowingText = field(default_factory=GrowingText)
    num_tokens: int = 0
    num_reasoning_tokens: int = 0
    num_cached_tokens: int = 0
    num_accepted: int = 0  # draft tokens from the request's prediction
    num_rejected: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    _calls: list[tuple[ToolCallDelta, GrowingText]] = field(default_factory=list)  # first delta and all arguments

    @property
    def calls(self) -> list[FunctionCall | CustomCall]:
        return [tool_call(first._replace(arguments=str(arguments))) for first, arguments in self._calls]

    def add(self, piece: ChoiceDelta, *, keep_text: bool) -> None:
        """Add a delta of this choice, and store its text and calls for the full response if `keep_text` is true."""
        self.num_tokens += piece.num_tokens
        if piece.num_reasoning_tokens:
            self.num_reasoning_tokens += piece.num_reasoning_tokens
        if piece.num_cached_tokens > self.num_cached_tokens:
            self.num_cached_tokens = piece.num_cached_tokens
        if piece.num_accepted or piece.num_rejected:
            self.num_accepted += piece.num_accepted
            self.num_rejected += piece.num_rejected
        if keep_text:
            self.text.add(piece.text)
            self.reasoning.add(piece.reasoning)
            self.add_calls(piece.calls)
        if piece.finish_reason is not None:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason

    def add_calls(self, deltas: Iterable[ToolCallDelta]) -> None:
        """Add new parts of tool calls. The first part of each call carries the name."""
        for delta in deltas:
            if delta.name is not None:
                self._calls.append((delta, GrowingText()))
            self._calls[delta.number][1].add(delta.arguments)


@dataclass(slots=True, kw_only=True)
class Answer:
    """The outputs of all choices so far, and the numbers for `usage`."""

    info: AnswerInfo
    request_id: str
    outputs: list[ChoiceOutput]  # one for each request
    token_bytes: Callable[[int], bytes]  # returns the bytes of a token id

    def usage(self, *, before: ChoiceDelta | None = None) -> TokenUsage:
        """Return `usage`. Each prompt counts once, and all tokens of all choices count, including end-of-text tokens.

        With `before`, the usage excludes the tokens of this delta.
        """
        num_completion_tokens = sum(output.num_tokens for output in self.outputs)
        num_reasoning = sum(output.num_reasoning_tokens for output in self.outputs)
        if before is not None:
            num_completion_tokens -= before.num_tokens
            num_reasoning -= before.num_reasoning_tokens
        usage: TokenUsage = {
            "prompt_tokens": self.info.num_prompt_tokens,
            "completion_tokens": num_completion_tokens,
            "total_tokens": self.info.num_prompt_tokens + num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": num_reasoning},
            **self.more_usage(),
        }
        if self.info.has_prediction:
            usage["completion_tokens_details"] |= {
                "accepted_prediction_tokens": sum(output.num_accepted for output in self.outputs),
                "rejected_prediction_tokens": sum(output.num_rejected for output in self.outputs),
            }
        return usage

    def usage_of_responses(self) -> ResponsesUsage:
        """Return `usage` with the field names of OpenAI's Responses API."""
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
            **self.more_usage(),
        }

    def more_usage(self) -> MoreUsage:
        """Return additional fields of `usage`, which OpenAI's API does not define."""
        return {}

    @property
    def num_cached_tokens(self) -> int:
        """Number of prompt tokens that came from the cache. Each prompt counts once, regardless of its samples."""
        return sum(output.num_cached_tokens for output in self.outputs[:: self.info.num_samples])


def tool_call(delta: ToolCallDelta) -> FunctionCall | CustomCall:
    """Return a tool call as JSON, with the arguments of its first delta."""
    assert delta.name is not None, "the first delta of a call has its name"
    if delta.is_custom:
        return {"id": delta.call_id, "type": "custom", "custom": {"name": delta.name, "input": delta.arguments}}
    return {
        "id": delta.call_id,
        "type": "function",
        "function": {"name": delta.name, "arguments": delta.arguments},
    }
