"""A served model, the limits for a request, and a request that was checked and tokenized."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from app.api.output.tool_calls import ToolUse
from app.api.schemas.fields import MAX_ALLOWED_TOKEN_IDS
from app.batches import MAX_REQUEST_BYTES
from app.config import PricesConfig
from app.engine.request import Adapter, Generate, Grammar, ModelInfo, Pooling, Request
from app.errors import InvalidRequest
from app.text import Reasoning, ReasoningMarks, Tokenizer
from app.text.tool_calls import ToolFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """The limits of the HTTP API for one request. An API key has further limits (see the file `api.keys_file`).

    The limits are not settings, because no deployment needs other values.
    """

    max_body_bytes: int = MAX_REQUEST_BYTES
    body_timeout_s: float = 60.0  # for the whole body; only an attacker sends more slowly
    max_choices: int = 128  # highest `n` and `best_of`; OpenAI's limit
    max_prompts: int = 128  # prompts × n in one call that waits for its response
    max_inputs: int = 2048  # texts in one embeddings call (OpenAI's limit); at most `max_prompts` run concurrently
    max_logprobs: int = 20  # highest `top_logprobs`, `logprobs` and `prompt_logprobs`; OpenAI's limit
    # Log-probabilities in one answer: choices × tokens × (1 + likeliest). Each takes about 80 bytes of JSON and 0.7 µs.
    max_answer_logprobs: int = 1_000_000
    # Requests × `allowed_token_ids`. Every request carries its own list to a replica, which reads 1,000 ids in 40 µs.
    max_allowed_token_ids: int = 32 * MAX_ALLOWED_TOKEN_IDS
    max_stop_strings: int = 32  # entries of `stop`; every new piece of text is searched for each entry
    max_stop_length: int = 256  # characters of one stop string; a stream holds back this number of characters
    heartbeat_s: float = 15.0  # silence before a stream sends a comment; proxies close silent streams after 30 to 60 s

    def shared_by(self, num_bodies: int) -> RequestLimits:
        """Return the limits for each of `num_bodies` bodies that are answered together."""
        if num_bodies < 2:
            return self
        return replace(
            self,
            max_answer_logprobs=self.max_answer_logprobs // num_bodies,
            max_allowed_token_ids=self.max_allowed_token_ids // num_bodies,
        )


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model that the API serves: its name, its tokenizer, its sizes, and the callable that generates tokens."""

    name: str
    tokenizer: Tokenizer
    model_info: ModelInfo
    generate: Generate
    created: int  # seconds since 1970
    aliases: tuple[str, ...] = ()  # other names that clients may send
    tool_format: ToolFormat | None = None  # the format of the model's tool calls; None if it is unknown
    reasoning_marks: ReasoningMarks | None = None  # the marks around reasoning; None if reasoning is not marked
    pooling: Pooling | None = None  # how embeddings are pooled; None if the model computes no embeddings
    adapter: Adapter | None = None  # the adapter that replicas apply
    parent: str = ""  # the model that an adapter adapts; empty for a base model
    deadline_s: float | None = None  # for requests without a deadline
    prices: PricesConfig = PricesConfig()  # noqa: RUF009 - frozen

    @cached_property
    def base(self) -> str:
        """The base model's name, which keys, replicas and metrics use. The base model of an adapter is its parent."""
        return self.parent or self.name

    @property
    def gives_embeddings(self) -> bool:
        return self.pooling is not None and self.model_info.embedding_size is not None

    def adapted(self, adapter: Adapter) -> ServedModel:
        """Return this model with an adapter, under the adapter's name."""
        return replace(self, name=adapter.name, aliases=(), adapter=adapter, parent=self.name, created=int(time.time()))

    def entry(self, name: str) -> dict[str, Any]:
        """Return the /v1/models entry under the model's name or an alias, for clients of OpenAI and Anthropic."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "carousel",
            "root": self.name,
            "parent": self.parent or None,
            "max_model_len": self.model_info.max_model_len,
            "permission": [],
            "type": "model",
            "display_name": name,
            "lifecycle": "active",
            "created_at": datetime.fromtimestamp(self.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDetailOptions:
    """The token details that a request asks for."""

    logprobs: int | None = None  # number of likeliest tokens for each generated or echoed token; None for no details
    names_are_ids: bool = False  # the response names tokens by their ids
    prompt_logprobs: int | None = None  # number of likeliest tokens for each prompt token, in vLLM's format
    token_ids: bool = False
    echo: bool = False  # the response's text includes the prompt
    choose_best: bool = False  # the answer consists of the likeliest of several samples


@dataclass(frozen=True, slots=True)
class SharedFields:
    """The fields that all prompts of a body share, checked and converted once."""

    sampling: Mapping[str, Any]  # the fields of `SamplingParams` that are equal in all requests
    grammar: Grammar | None
    details: TokenDetailOptions | None
    tools: ToolUse | None
    prediction: tuple[int, ...] = ()  # token ids of the output that the client predicts
    ignored: tuple[str, ...] = ()  # names of the fields that have no effect on this model


class AnswerInfo(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The values that the writers of an answer need in addition to its deltas. A stored answer includes them.

    An older version may have stored the answer, so new fields need defaults.
    """

    response_id: str
    created: int  # seconds since 1970
    model: str
    num_requests: int
    num_prompt_tokens: int
    num_logprobs: int = 0  # the maximum in the answer
    num_samples: int = 1
    num_choices: int = 1
    detail_options: TokenDetailOptions | None = None
    prompt_token_ids: tuple[tuple[int, ...], ...] = ()  # for each request, if the answer shows token ids
    include_usage: bool = False
    continuous_usage: bool = False
    has_prediction: bool = False
    ignored: tuple[str, ...] = ()  # names of the fields of the body that have no effect
    of_body: bytes = b"{}"  # the fields of a response (`/v1/responses`) that repeat its request, as JSON


class EchoedPrompt(NamedTuple):
    """The text of a prompt that is written before the generated text."""

    text: str = ""
    num_added_tokens: int = 0  # tokens that the tokenizer added before the prompt; `text` does not contain them


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A client's request, checked and tokenized: `num_samples` engine requests for each prompt, prompt by prompt.

    The answer contains the `num_choices` likeliest samples of each prompt. No engine request has started yet.
    """

    response_id: str
    created: int  # seconds since 1970
    model: ServedModel
    requests: tuple[Request, ...]
    num_prompt_tokens: int  # each prompt counts once, regardless of its number of samples
    num_logprobs: int = 0  # the maximum in the answer, for generated, echoed and prompt tokens
    ignored: tuple[str, ...] = ()  # names of the fields that have no effect on this model
    num_samples: int = 1
    num_choices: int = 1
    echoes: tuple[EchoedPrompt, ...] = ()  # one for each prompt, or empty if prompts are not echoed
    stop: tuple[str, ...] = ()
    stop_tokens: Mapping[int, str] = field(default_factory=dict)  # maps the ids of special tokens in `stop` to text
    skip_special_tokens: bool = True
    include_stop: bool = False
    detail_options: TokenDetailOptions | None = None
    include_usage: bool = False
    continuous_usage: bool = False
    reasoning: Reasoning | None = None  # splits reasoning from the text; None if the model marks no reasoning
    tools: ToolUse | None = None  # splits tool calls from the text; None if no tools are offered
    max_at_once: int | None = None  # maximum number of requests that run concurrently; None for all
    first_runs_alone: bool = False  # the other requests start after the first has finished and cached their prefix
    wants_timings: bool = False  # `usage` includes timings

    @property
    def is_large(self) -> bool:
        """Whether writing the answer may take more than a few milliseconds."""
        # An embedding of one request may have thousands of numbers.
        return self.num_logprobs > 2000 or len(self.requests) > 4

    def info(self) -> AnswerInfo:
        """Return the values that are known about the answer before any token is generated."""
        shows_prompts = self.detail_options is not None and self.detail_options.token_ids
        return AnswerInfo(
            response_id=self.response_id,
            created=self.created,
            model=self.model.name,
            num_requests=len(self.requests),
            num_prompt_tokens=self.num_prompt_tokens,
            num_logprobs=self.num_logprobs,
            num_samples=self.num_samples,
            num_choices=self.num_choices,
            detail_options=self.detail_options,
            prompt_token_ids=tuple(tuple(each.prompt_token_ids) for each in self.requests) if shows_prompts else (),
            include_usage=self.include_usage,
            continuous_usage=self.continuous_usage,
            has_prediction=bool(self.requests[0].prediction_token_ids),
        )

    def echo(self, index: int) -> EchoedPrompt:
        """Return the prompt that the request with this index echoes. Its text is empty if prompts are not echoed."""
        return self.echoes[index // self.num_samples] if self.echoes else EchoedPrompt()


def by_any_name(models: Iterable[ServedModel]) -> dict[str, ServedModel]:
    """Return all models by their names and by their aliases."""
    return {name: model for model in models for name in (model.name, *model.aliases)}


def check_token_ids(token_ids: Collection[int], model: ServedModel, param: str) -> None:
    """Raise InvalidRequest if a token id is outside the model's vocabulary."""
    vocab_size = model.model_info.vocab_size
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(
            f"{param} contains the token id {str(wrong)[:40]}; this model's token ids are 0 to {vocab_size - 1:,}",
            param=param,
        )
