"""What endpoints share: prompts become token ids, a body that generates a `PreparedRequest`, everything checked.

Every mistake in a request is found here, before it uses anything that other requests need. Nothing is started.
"""

from __future__ import annotations

import hashlib
import secrets
import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.api.json_structure import MAX_STRUCTURE, check_structure
from app.api.output.structured_output import grammar_of
from app.api.output.tool_calls import ToolUse, tool_use
from app.api.prepared_request import PreparedRequest, RequestLimits, ServedModel, TokenDetailOptions, check_token_ids
from app.api.schemas.requests import ChatRequest, Conversation, GenerationRequest, QueuedRequest, template_messages
from app.engine.request import Pooling, Request, SamplingParams
from app.errors import ContextTooLong, InvalidRequest
from app.text import Tokenizer
from app.text.text_pairs import EncodedText

SEED_MASK = 2**63 - 1
# A text with more characters for each token of the context is counted before it is encoded: it is hardly one that fits.
USUAL_CHARACTERS_PER_TOKEN = 16
# Bytes of a text of which only the end is wanted, or the number of tokens: it is encoded in a second.
MAX_LONGER_TEXT = 1_000_000


def check_limits(body: GenerationRequest, model: ServedModel, limits: RequestLimits) -> None:
    """What needs only the body, the limits and the facts of the model."""
    if not model.facts.generates:
        raise InvalidRequest(
            f"the model {model.name!r} is an encoder and generates no text; ask another, or ask it at /v1/embeddings, "
            f"/v1/rerank or /v1/score",
            param="model",
        )
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
    param = body.stop_param
    if len(body.stop) > limits.max_stop_strings:
        raise InvalidRequest(
            f"{param} has {len(body.stop):,} strings; this server accepts at most {limits.max_stop_strings:,}",
            param=param,
        )
    longest = max(map(len, body.stop), default=0)
    if longest > limits.max_stop_length:
        raise InvalidRequest(
            f"{param} has a string of {longest:,} characters; this server accepts at most {limits.max_stop_length:,}",
            param=param,
        )
    check_token_ids(body.stop_token_ids, model, "stop_token_ids")
    check_token_ids(tuple(body.logit_bias), model, "logit_bias")
    check_token_ids(body.allowed_token_ids, model, "allowed_token_ids")


@dataclass(frozen=True, slots=True)
class SharedFields:
    """What all prompts of a body have in common, checked and made once."""

    sampling: SamplingParams  # all but what each request has of its own: `max_tokens`, `seed`, `prompt_logprobs`
    details: TokenDetailOptions
    tools: ToolUse | None


def shared_fields(body: GenerationRequest, model: ServedModel, limits: RequestLimits) -> SharedFields:
    """Raises InvalidRequest."""
    check_limits(body, model, limits)
    tools = tool_use(body, model.tokenizer, model.tool_format) if isinstance(body, ChatRequest) else None
    details = _detail_options(body)
    sampling = _sampling(body, model.tokenizer, details)
    if tools is not None and tools.grammar is not None:  # there is nothing but calls that could have another form
        sampling = replace(sampling, grammar=tools.grammar)
    return SharedFields(sampling, details, tools)


def encode_prompts(
    prompts: Sequence[str | list[int]],
    model: ServedModel,
    param: str,
    *,
    add_special_tokens: bool,
    may_be_longer: bool = False,
) -> list[tuple[int, ...]]:
    """The token ids of texts, and of prompts that are ids already.

    Raises InvalidRequest for ids that do not exist and for texts that the context cannot hold; `may_be_longer`: that is
    no mistake of a text.
    """
    check_texts([each for each in prompts if isinstance(each, str)], model, param, may_be_longer=may_be_longer)
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_token_ids(prompt, model, param)
    most = _max_encoded(model)
    return [
        model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens, max_tokens=most)
        if isinstance(prompt, str)
        else tuple(prompt)
        for prompt in prompts
    ]


def check_texts(texts: Sequence[str], model: ServedModel, param: str, *, may_be_longer: bool = False) -> None:
    """Raise InvalidRequest for texts that the context cannot hold, as far as that is known without their tokens."""
    for text in texts:
        _check_text(text, model, param, may_be_longer=may_be_longer)


def encode_chat(
    body: Conversation,
    model: ServedModel,
    *,
    with_tools: bool,
    continue_final_message: bool = False,
    may_be_longer: bool = False,
) -> tuple[int, ...]:
    """The token ids of a conversation in the model's chat template. Raises InvalidRequest as `encode_prompts`."""
    calls = [call for message in body.messages for call in message.tool_calls or ()]
    check_structure(
        (call.function.arguments.encode() for call in calls),
        "arguments of tool calls",
        param="messages",
        max_values=MAX_STRUCTURE,
    )
    text = model.tokenizer.render_chat(
        template_messages(body.messages),
        add_generation_prompt=body.add_generation_prompt and not continue_final_message,
        continue_final_message=continue_final_message,
        tools=[tool.for_template() for tool in body.tools] if with_tools else None,
        template_variables=body.template_variables,
    )
    _check_text(text, model, "messages", may_be_longer=may_be_longer)
    return model.tokenizer.encode(text, add_special_tokens=body.add_special_tokens, max_tokens=_max_encoded(model))


def _max_encoded(model: ServedModel) -> int:
    """The most tokens of a text that are worth an exact answer."""
    return max(2 * model.facts.max_model_len, MAX_LONGER_TEXT)


def _check_text(text: str, model: ServedModel, param: str, *, may_be_longer: bool) -> None:
    """Raise InvalidRequest for a text that the context cannot hold, before all of it is encoded.

    A text that may be longer, as only its end is wanted or its tokens are counted, has a limit too.
    """
    max_model_len = model.facts.max_model_len
    if len(text) <= max_model_len * USUAL_CHARACTERS_PER_TOKEN:
        return
    if may_be_longer:
        if (num_bytes := len(text.encode())) <= MAX_LONGER_TEXT:
            return
        raise ContextTooLong(
            f"{param} has a text of {num_bytes:,} bytes; at most {MAX_LONGER_TEXT:,} are accepted, and this model "
            f"accepts {max_model_len:,} tokens; shorten it",
            param=param,
        )
    num_tokens = model.tokenizer.count_up_to(text, 2 * max_model_len)
    if num_tokens > 2 * max_model_len:
        raise ContextTooLong(
            f"{param} has a text of {len(text):,} characters, which has more than {max_model_len:,} tokens; this model "
            f"accepts {max_model_len:,} together with its output; shorten the prompt",
            param=param,
        )


def scheduling_of(body: QueuedRequest, model: ServedModel) -> dict[str, Any]:
    """The fields of an engine's request that say for which tenant it is, and when it runs.

    A request that names no deadline has the model's; a background request has all the time there is.
    """
    is_background = body.service_tier == "flex"
    default_s = None if is_background else model.deadline_s
    return {
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "tenant": body.user,
        "deadline_s": default_s if body.deadline_s is None else body.deadline_s,
        "is_background": is_background,
    }


def pooling_call(
    prefix: str,
    body: QueuedRequest,
    model: ServedModel,
    limits: RequestLimits,
    prompts: Iterable[EncodedText],
    pooling: Pooling | None,
) -> PreparedRequest:
    """The call of prompts that fit, of which each is computed for a vector or a score, and generates nothing."""
    call_id = f"{prefix}-{uuid.uuid4().hex}"
    scheduling = scheduling_of(body, model)
    requests = [
        Request(
            request_id=f"{call_id}-{index}",
            prompt_token_ids=prompt.token_ids,
            sampling=SamplingParams(max_tokens=0),
            pooling=pooling,
            second_text_at=prompt.second_at,
            **scheduling,
        )
        for index, prompt in enumerate(prompts)
    ]
    return PreparedRequest(
        call_id=call_id,
        created=int(time.time()),
        model=model,
        requests=tuple(requests),
        max_at_once=limits.max_prompts,
    )


def call_of(
    prefix: str,
    body: GenerationRequest,
    model: ServedModel,
    limits: RequestLimits,
    prompts: Sequence[tuple[int, ...]],
    shared: SharedFields,
    *,
    default_max_tokens: int | None,
) -> PreparedRequest:
    """The call of a checked body. Raises InvalidRequest for what depends on the lengths of its prompts."""
    call_id = f"{prefix}-{uuid.uuid4().hex}"
    requests: list[Request] = []
    scheduling = scheduling_of(body, model)
    for prompt in prompts:
        prompt = _truncated(prompt, body, model.facts.max_model_len)
        max_tokens = _max_tokens(body, len(prompt), model.facts.max_model_len, default_max_tokens)
        seed = secrets.randbits(63) if body.seed is None else body.seed & SEED_MASK
        for sample in range(body.num_samples):
            request = Request(
                request_id=f"{call_id}-{len(requests)}",
                prompt_token_ids=prompt,
                sampling=replace(
                    shared.sampling,
                    max_tokens=max_tokens,
                    seed=_sample_seed(seed, sample),
                    prompt_logprobs=shared.details.scored_logprobs(is_first=sample == 0),
                ),
                **scheduling,
            )
            requests.append(request)
    call = PreparedRequest(
        call_id=call_id,
        created=int(time.time()),
        model=model,
        requests=tuple(requests),
        num_samples=body.num_samples,
        num_choices=body.n,
        stop=tuple(body.stop),
        skip_special_tokens=body.skip_special_tokens,
        include_stop=body.include_stop_str_in_output,
        detail_options=shared.details,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        tools=shared.tools,
    )
    _check_allowed_token_ids(call, len(body.allowed_token_ids), limits.max_allowed_token_ids)
    is_open_ended = body.asked_tokens is None and default_max_tokens is None
    return _with_bounded_logprobs(call, body, limits.max_answer_logprobs, is_open_ended=is_open_ended)


def _check_allowed_token_ids(call: PreparedRequest, number: int, most: int) -> None:
    if number * len(call.requests) > most:
        raise InvalidRequest(
            f"allowed_token_ids has {number:,} ids for each of {len(call.requests):,} requests; this server accepts "
            f"{most:,} in these together; send fewer ids, or fewer prompts or choices at once",
            param="allowed_token_ids",
        )


def _with_bounded_logprobs(
    call: PreparedRequest, body: GenerationRequest, most: int, *, is_open_ended: bool
) -> PreparedRequest:
    """The call with at most so many log-probabilities: an open-ended output is cut, all else refused."""
    num_logprobs, num_tokens = call.num_logprobs, call.requests[0].sampling.max_tokens
    if num_logprobs <= most:
        return call
    param, num_top = body.asked_logprobs
    if num_top is not None and is_open_ended:  # of one prompt, so all samples may have the same length
        num_per_length = len(call.requests) * (1 + num_top)
        longest = (most - num_logprobs + num_per_length * num_tokens) // num_per_length
        if longest >= max(1, body.min_tokens):
            return call.with_max_tokens(longest)
    if num_top is None:
        param = "prompt_logprobs"
    raise InvalidRequest(
        f"the answer could have {num_logprobs:,} log-probabilities: {len(call.requests):,} choices of up to "
        f"{num_tokens:,} tokens and {call.num_prompt_tokens:,} prompt tokens, each with its likeliest; this server "
        f"accepts {most:,} in one answer; lower {param}, {body.length_param} or n, or send fewer or shorter prompts",
        param=param,
    )


def _detail_options(body: GenerationRequest) -> TokenDetailOptions:
    return TokenDetailOptions(
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


def _sampling(body: GenerationRequest, tokenizer: Tokenizer, details: TokenDetailOptions) -> SamplingParams:
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
        logprobs=details.drawn_logprobs,
    )


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word's token ids, at the beginning of a text and behind a space."""
    if not words:
        return ()
    encoded = tokenizer.encode_all([text for word in words for text in (word, f" {word.lstrip()}")])
    return tuple(dict.fromkeys(token_ids for token_ids in encoded if token_ids))
