"""A served model as the API sees it, the limits of a request on it, and a request that is checked and tokenized."""

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
    """The limits of the HTTP API for one request. A key has its own beside them (the file `api.keys_file`).

    They are constants: no deployment needs others.
    """

    max_body_bytes: int = MAX_REQUEST_BYTES
    body_timeout_s: float = 60.0  # for the whole body; a slower one is no honest client
    max_choices: int = 128  # highest `n` and `best_of`, as OpenAI has it
    max_prompts: int = 128  # prompts × n in one call that waits for its response
    max_inputs: int = 2048  # texts in one embeddings call, as OpenAI has it; `max_prompts` of them computed at once
    max_logprobs: int = 20  # highest `top_logprobs`, `logprobs` and `prompt_logprobs`, as OpenAI has it
    # Log-probabilities in one answer: choices × tokens × (1 + likeliest). One costs some 80 bytes of JSON and 0.7 µs.
    max_answer_logprobs: int = 1_000_000
    # Requests × `allowed_token_ids`: each request carries its own to its replica, which reads a thousand in 40 µs.
    max_allowed_token_ids: int = 32 * MAX_ALLOWED_TOKEN_IDS
    max_stop_strings: int = 32  # entries of `stop`; each is looked for in every piece of text that may begin one
    max_stop_length: int = 256  # characters of one stop string: so much of the text is held back
    heartbeat_s: float = 15.0  # silence on a stream after which a comment is sent: proxies close at 30 to 60 s

    def shared_by(self, num_bodies: int) -> RequestLimits:
        """The limits of each of several bodies that are answered together."""
        if num_bodies < 2:
            return self
        return replace(
            self,
            max_answer_logprobs=self.max_answer_logprobs // num_bodies,
            max_allowed_token_ids=self.max_allowed_token_ids // num_bodies,
        )


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """A model as the API sees it: its name, its tokenizer, its sizes, and the callable that generates."""

    name: str
    tokenizer: Tokenizer
    facts: ModelInfo
    generate: Generate
    created: int  # seconds since 1970
    aliases: tuple[str, ...] = ()  # other names that clients may send
    tool_format: ToolFormat | None = None  # how it writes tool calls; None: unknown
    reasoning_marks: ReasoningMarks | None = None  # around its reasoning; None: it marks none
    pooling: Pooling | None = None  # what its embeddings are; None: it gives none
    adapter: Adapter | None = None  # with which its replicas compute
    parent: str = ""  # of an adapter: the model that it adapts
    deadline_s: float | None = None  # of requests that name none
    prices: PricesConfig = PricesConfig()  # noqa: RUF009 - frozen

    @cached_property
    def base(self) -> str:
        """The model that keys are for, replicas belong to and metrics count: of an adapter its parent."""
        return self.parent or self.name

    @property
    def gives_embeddings(self) -> bool:
        """Whether it makes vectors of texts."""
        return self.pooling is not None and self.facts.embedding_size is not None

    def adapted(self, adapter: Adapter) -> ServedModel:
        """The same model with an adapter, under the adapter's name."""
        return replace(self, name=adapter.name, aliases=(), adapter=adapter, parent=self.name, created=int(time.time()))

    def entry(self, name: str) -> dict[str, Any]:
        """What /v1/models says of it, under its name or an alias, for OpenAI's clients and for Anthropic's."""
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "carousel",
            "root": self.name,
            "parent": self.parent or None,
            "max_model_len": self.facts.max_model_len,
            "permission": [],
            "type": "model",
            "display_name": name,
            "lifecycle": "active",
            "created_at": datetime.fromtimestamp(self.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDetailOptions:
    """Which details a request asks for."""

    logprobs: int | None = None  # of generated tokens, and of an echoed prompt's, with so many of the likeliest
    names_are_ids: bool = False  # tokens are named by their ids
    prompt_logprobs: int | None = None  # in the format of vLLM
    token_ids: bool = False
    echo: bool = False  # the prompt is part of the text
    choose_best: bool = False  # of several samples, by how likely they were


@dataclass(frozen=True, slots=True)
class SharedFields:
    """What all prompts of a body have in common, checked and made once."""

    sampling: Mapping[str, Any]  # fields of `SamplingParams`: all but what each request has of its own
    grammar: Grammar | None
    details: TokenDetailOptions | None
    tools: ToolUse | None
    prediction: tuple[int, ...] = ()  # token ids of what much of each output may be
    ignored: tuple[str, ...] = ()  # names of what has no effect on this model


class AnswerFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that the writers of an answer need beside its deltas. It is stored with an answer that is stored.

    A stored answer may be older than the version that reads it: new fields have defaults.
    """

    response_id: str
    created: int  # seconds since 1970
    model: str
    num_requests: int
    num_prompt_tokens: int
    num_logprobs: int = 0  # the most that the answer can have
    num_samples: int = 1
    num_choices: int = 1
    detail_options: TokenDetailOptions | None = None
    prompt_token_ids: tuple[tuple[int, ...], ...] = ()  # of each request, where the answer has them
    include_usage: bool = False
    continuous_usage: bool = False
    has_prediction: bool = False
    ignored: tuple[str, ...] = ()  # fields of the body without effect
    of_body: bytes = b"{}"  # JSON: the fields of a response (`/v1/responses`) that repeat its request


class EchoedPrompt(NamedTuple):
    """The text of a prompt that stands before the generated text."""

    text: str = ""
    num_unseen: int = 0  # of the prompt's first tokens, those that the tokenizer added: the text does not have them


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A client's request, checked and tokenized: `num_samples` requests of engines for each prompt, prompt by prompt.

    The `num_choices` likeliest of them are the answer. Nothing is started.
    """

    response_id: str
    created: int  # seconds since 1970
    model: ServedModel
    requests: tuple[Request, ...]
    num_prompt_tokens: int  # each prompt counted once, however many samples it gets
    num_logprobs: int = 0  # the most that its answer can have: of generated, of echoed and of prompt tokens
    ignored: tuple[str, ...] = ()  # names of what has no effect on this model
    num_samples: int = 1
    num_choices: int = 1
    echoes: tuple[EchoedPrompt, ...] = ()  # one for each prompt where prompts are echoed
    stop: tuple[str, ...] = ()
    stop_tokens: Mapping[int, str] = field(default_factory=dict)  # the special tokens in `stop`, each with its text
    skip_special_tokens: bool = True
    include_stop: bool = False
    detail_options: TokenDetailOptions | None = None
    include_usage: bool = False
    continuous_usage: bool = False
    reasoning: Reasoning | None = None  # how reasoning is taken out of the text, where the model marks it
    tools: ToolUse | None = None  # how calls are taken out of the text, where tools are on offer
    max_at_once: int | None = None  # so many of the requests run at the same time; None: all
    first_goes_ahead: bool = False  # the others run once it has ended: they begin as it does, which is cached then
    wants_timings: bool = False  # in `usage`

    @property
    def is_large(self) -> bool:
        """Whether to write its answer may take more than a few milliseconds."""
        # A request may have an embedding of thousands of numbers.
        return self.num_logprobs > 2000 or len(self.requests) > 4

    def facts(self) -> AnswerFacts:
        """The facts about its answer."""
        shows_prompts = self.detail_options is not None and self.detail_options.token_ids
        return AnswerFacts(
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
        """What one of the requests echoes; an empty text where prompts are not echoed."""
        return self.echoes[index // self.num_samples] if self.echoes else EchoedPrompt()


def by_any_name(models: Iterable[ServedModel]) -> dict[str, ServedModel]:
    """Each model under its name and under each of its aliases."""
    return {name: model for model in models for name in (model.name, *model.aliases)}


def check_token_ids(token_ids: Collection[int], model: ServedModel, param: str) -> None:
    """Raise InvalidRequest for an id that the model does not have."""
    vocab_size = model.facts.vocab_size
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(
            f"{param} has the token id {str(wrong)[:40]}; this model's ids are 0 to {vocab_size - 1:,}", param=param
        )
