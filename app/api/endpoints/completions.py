"""The use case behind both endpoints: a typed request becomes a `Call`, everything checked, nothing started.

All that can be wrong with a request is found here, before it costs anybody else anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from app.api.output.structured_output import grammar_of
from app.api.output.token_details import TokenWishes
from app.api.output.tool_calls import ToolUse, tool_use
from app.api.schemas.requests import ChatRequest, CompletionRequest, GenerationRequest, template_messages
from app.api.schemas.responses import ResponsesRequest
from app.config import ApiConfig
from app.engine.request import Generate, ModelFacts, Pooling, Request, SamplingParams
from app.errors import ContextTooLong, InvalidRequest, NotFound
from app.text import Tokenizer
from app.text.tool_calls import ToolFormat

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's; a chat may use the rest of the context
MAX_CHARACTERS_ON_THE_LOOP = 2000  # longer texts are encoded in a thread, so that streams do not stutter
SEED_MASK = 2**63 - 1

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A model as the API sees it: its name, its words, its numbers and who generates."""

    name: str
    tokenizer: Tokenizer
    facts: ModelFacts
    generate: Generate
    created: int  # seconds since 1970
    aliases: tuple[str, ...] = ()  # other names that clients may send
    tool_format: ToolFormat | None = None  # how it writes tool calls; None: nobody knows
    pooling: Pooling | None = None  # what its embeddings are; None: it gives none
    group_header: str = "x-carousel-group"
    session_header: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One API call, checked and tokenized: `num_samples` requests for each prompt, prompt by prompt.

    The `num_choices` likeliest of them are the answer.
    """

    call_id: str
    created: int  # seconds since 1970
    model: ServedModel
    requests: tuple[Request, ...]
    num_samples: int
    num_choices: int
    prompt_texts: tuple[str, ...]  # one for each prompt that is to be echoed; none otherwise
    stop: tuple[str, ...]
    skip_special_tokens: bool
    include_stop: bool
    wishes: TokenWishes
    include_usage: bool
    continuous_usage: bool
    tools: ToolUse | None = None  # how calls are taken out of the text, where tools are on offer
    max_at_once: int | None = None  # so many of the requests run at the same time; None: all

    def prompt_text(self, index: int) -> str:
        """What one of the requests echoes; "" where nothing is."""
        return self.prompt_texts[index // self.num_samples] if self.prompt_texts else ""

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counted once, however many samples it gets."""
        return sum(len(request.prompt_token_ids) for request in self.requests[:: self.num_samples])


def by_any_name(models: Iterable[ServedModel]) -> dict[str, ServedModel]:
    """Each model under its name and under each of its aliases."""
    return {name: model for model in models for name in (model.name, *model.aliases)}


def model_named(name: str | None, models: Mapping[str, ServedModel]) -> ServedModel:
    """The one of `models`, by any name, that has this name; without a name the only one. Raises InvalidRequest."""
    if name is not None and name in models:
        return models[name]
    own_names = {model.name: model for model in models.values()}
    if name is None and len(own_names) == 1:
        return next(iter(own_names.values()))
    served = ", ".join(own_names)
    if name is None:
        raise InvalidRequest(f"model is required: this server has {served}", param="model")
    raise NotFound(f"there is no model {name[:100]!r}; this server has {served}", param="model", code="model_not_found")


async def prepare_chat(body: ChatRequest, model: ServedModel, limits: ApiConfig) -> Call:
    """Check and tokenize a chat. Raises InvalidRequest."""
    _check_limits(body, model, limits)
    tools = tool_use(body, model.tokenizer, model.tool_format)
    messages = template_messages(body.messages)
    offered = [tool.for_template() for tool in body.tools] if tools else None

    def encode() -> list[tuple[int, ...]]:
        return [
            model.tokenizer.encode_chat(
                messages,
                add_generation_prompt=body.begins_message,
                continue_final_message=body.continue_final_message,
                add_special_tokens=body.add_special_tokens,
                tools=offered,
                template_variables=body.chat_template_kwargs,
            )
        ]

    num_characters = sum(message.num_characters for message in body.messages) + len(str(offered or ""))
    prompts = await off_the_loop(encode, num_characters)
    return _call("chatcmpl", body, model, prompts, default_max_tokens=None, tools=tools)


async def prepare_reply(body: ResponsesRequest, model: ServedModel, limits: ApiConfig) -> Call:
    """Check and tokenize what /v1/responses was asked. Raises InvalidRequest."""
    call = await prepare_chat(body.as_chat(), model, limits)
    return replace(call, call_id=f"resp_{uuid.uuid4().hex}")


async def prepare_completion(body: CompletionRequest, model: ServedModel, limits: ApiConfig) -> Call:
    """Check and tokenize one prompt or several. Raises InvalidRequest."""
    _check_limits(body, model, limits)
    if len(body.prompt) > limits.max_prompts:
        raise InvalidRequest(
            f"prompt holds {len(body.prompt):,} prompts; this server accepts {limits.max_prompts:,} in one call",
            param="prompt",
        )
    num_requests, param = len(body.prompt) * body.num_samples, "n" if body.best_of is None else "best_of"
    if num_requests > limits.max_prompts:
        raise InvalidRequest(
            f"{len(body.prompt):,} prompts with {param} of {body.num_samples:,} make {num_requests:,} choices; "
            f"this server accepts {limits.max_prompts:,} in one call",
            param=param,
        )

    def encode() -> list[tuple[int, ...]]:
        return [
            model.tokenizer.encode(prompt, add_special_tokens=body.add_special_tokens)
            if isinstance(prompt, str)
            else tuple(prompt)
            for prompt in body.prompt
        ]

    for prompt in body.prompt:
        if not isinstance(prompt, str):
            check_token_ids(prompt, model, "prompt")
    num_characters = sum(len(prompt) for prompt in body.prompt if isinstance(prompt, str))
    prompts = await off_the_loop(encode, num_characters)
    call = _call("cmpl", body, model, prompts, default_max_tokens=DEFAULT_COMPLETION_TOKENS)
    return replace(call, prompt_texts=await _prompt_texts(body, call)) if body.echo else call


async def _prompt_texts(body: CompletionRequest, call: Call) -> tuple[str, ...]:
    """What is echoed of each prompt: the text as it was sent; of token ids and of what was cut short, theirs."""
    cut = body.truncate_prompt_tokens is not None
    prompts = [request.prompt_token_ids for request in call.requests[:: call.num_samples]]

    def text(given: str | list[int], token_ids: tuple[int, ...]) -> str:
        if isinstance(given, str) and not cut:
            return given
        return call.model.tokenizer.decode(token_ids, skip_special_tokens=body.skip_special_tokens)

    def texts() -> tuple[str, ...]:
        return tuple(text(given, token_ids) for given, token_ids in zip(body.prompt, prompts, strict=True))

    return await off_the_loop(texts, sum(map(len, prompts)))


async def off_the_loop(work: Callable[[], T], num_characters: int) -> T:
    """The result of work on so many characters, which must not hold up the streams of others."""
    return work() if num_characters <= MAX_CHARACTERS_ON_THE_LOOP else await asyncio.to_thread(work)


def _check_limits(body: GenerationRequest, model: ServedModel, limits: ApiConfig) -> None:
    """What needs only the body, the limits and the size of the vocabulary."""
    if body.n > limits.max_choices:
        raise InvalidRequest(f"n is {body.n:,}; this server accepts at most {limits.max_choices:,}", param="n")
    if body.num_samples > limits.max_choices:
        raise InvalidRequest(
            f"best_of is {body.num_samples:,}; this server accepts at most {limits.max_choices:,}", param="best_of"
        )
    for param, num_top in (body.asked_logprobs, ("prompt_logprobs", body.prompt_logprobs)):
        if num_top is not None and num_top > limits.max_logprobs:
            raise InvalidRequest(
                f"{param} is {num_top:,}; this server accepts at most {limits.max_logprobs:,}", param=param
            )
    if len(body.stop) > limits.max_stop_strings:
        raise InvalidRequest(
            f"stop has {len(body.stop):,} strings; this server accepts at most {limits.max_stop_strings:,}",
            param="stop",
        )
    longest = max(map(len, body.stop), default=0)
    if longest > limits.max_stop_length:
        raise InvalidRequest(
            f"stop has a string of {longest:,} characters; this server accepts at most {limits.max_stop_length:,}",
            param="stop",
        )
    check_token_ids(body.stop_token_ids, model, "stop_token_ids")
    check_token_ids(tuple(body.logit_bias), model, "logit_bias")
    check_token_ids(body.allowed_token_ids, model, "allowed_token_ids")


def check_token_ids(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Raise InvalidRequest for an id that the model does not have."""
    vocab_size = model.facts.vocab_size
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(
            f"{param} has the token id {str(wrong)[:40]}; this model's ids are 0 to {vocab_size - 1:,}", param=param
        )


def _call(
    prefix: str,
    body: GenerationRequest,
    model: ServedModel,
    prompts: Sequence[tuple[int, ...]],
    *,
    default_max_tokens: int | None,
    tools: ToolUse | None = None,
) -> Call:
    call_id = f"{prefix}-{uuid.uuid4().hex}"
    wishes = _wishes(body)
    sampling = _sampling(body, wishes, model.tokenizer)
    if tools is not None and tools.grammar is not None:  # there is nothing but calls that could have another form
        sampling = replace(sampling, grammar=tools.grammar)
    requests: list[Request] = []
    for prompt in prompts:
        prompt = _truncated(prompt, body, model.facts.max_model_len)
        max_tokens = _max_tokens(body, len(prompt), model.facts.max_model_len, default_max_tokens)
        seed = secrets.randbits(63) if body.seed is None else body.seed & SEED_MASK
        for sample in range(body.num_samples):
            request = Request(
                request_id=f"{call_id}-{len(requests)}",
                prompt_token_ids=prompt,
                sampling=replace(
                    sampling,
                    max_tokens=max_tokens,
                    seed=_sample_seed(seed, sample),
                    prompt_logprobs=wishes.scored_logprobs(is_first=sample == 0),
                ),
                cache_salt=body.cache_salt,
                priority=body.priority,
                tenant=body.user,
                deadline_s=body.deadline_s,
                is_background=body.service_tier == "flex",
            )
            requests.append(request)
    return Call(
        call_id=call_id,
        created=int(time.time()),
        model=model,
        requests=tuple(requests),
        num_samples=body.num_samples,
        num_choices=body.n,
        prompt_texts=(),
        stop=tuple(body.stop),
        skip_special_tokens=body.skip_special_tokens,
        include_stop=body.include_stop_str_in_output,
        wishes=wishes,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        tools=tools,
    )


def _wishes(body: GenerationRequest) -> TokenWishes:
    return TokenWishes(
        logprobs=body.asked_logprobs[1],
        names_are_ids=body.return_tokens_as_token_ids,
        prompt_logprobs=body.prompt_logprobs,
        token_ids=body.return_token_ids,
        echo=body.asks_for_echo,
        choose_best=body.num_samples > body.n,
    )


def _truncated(prompt: tuple[int, ...], body: GenerationRequest, max_model_len: int) -> tuple[int, ...]:
    """The prompt's end, where so much of it is wanted."""
    num_kept = body.truncate_prompt_tokens
    if num_kept == -1:
        num_kept = max(1, max_model_len - (1 if body.asked_tokens is None else body.asked_tokens))
    return prompt if num_kept is None else prompt[-num_kept:]


def _max_tokens(body: GenerationRequest, num_prompt_tokens: int, max_model_len: int, default: int | None) -> int:
    """The output length of one request: what was asked, else the default, else the rest of the context."""
    param = body.prompt_param
    if num_prompt_tokens == 0:
        raise InvalidRequest(f"{param} is empty: it has no tokens; give at least one", param=param)
    room = max_model_len - num_prompt_tokens
    asked = body.asked_tokens
    if asked is not None and asked > room:
        raise ContextTooLong(
            f"prompt has {num_prompt_tokens:,} tokens and {body.length_param} is {asked:,}; this model accepts "
            f"{max_model_len:,} together; shorten the prompt or lower {body.length_param}",
            param=param if room < 1 else body.length_param,
        )
    if room < 1 and asked != 0:
        raise ContextTooLong(
            f"prompt has {num_prompt_tokens:,} tokens; this model accepts {max_model_len:,} with at least one "
            f"of output; shorten the prompt",
            param=param,
        )
    max_tokens = min(room, default or room) if asked is None else asked
    if body.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {body.min_tokens:,} and {body.length_param} is {max_tokens:,}; it cannot be more",
            param="min_tokens",
        )
    return max_tokens


def _sample_seed(seed: int, sample: int) -> int:
    """Sample 0 has the seed itself, so that n=1 and the first of n=4 say the same; the others have their own."""
    if sample == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & SEED_MASK


def _sampling(body: GenerationRequest, wishes: TokenWishes, tokenizer: Tokenizer) -> SamplingParams:
    """All but what each request has of its own: `max_tokens`, `seed` and `prompt_logprobs`."""
    return SamplingParams(
        max_tokens=1,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=max(0, body.top_k),
        top_p=body.top_p,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=tuple(body.logit_bias.items()),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        grammar=grammar_of(body),
        allowed_token_ids=tuple(body.allowed_token_ids),
        bad_words=_bad_words(body.bad_words, tokenizer),
        logprobs=wishes.drawn_logprobs,
    )


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word's token ids, at the beginning of a text and behind a space."""
    texts = [text for word in words for text in (word, f" {word.lstrip()}")]
    encoded = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return tuple(dict.fromkeys(token_ids for token_ids in encoded if token_ids))
