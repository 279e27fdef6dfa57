"""Steps shared by all endpoints: check a body, encode its prompts, and build a `PreparedRequest`.

Mistakes in a request are reported here, before the request uses resources that other requests need.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from itertools import repeat

from app.api.json_structure import MAX_STRUCTURE, check_structure
from app.api.output.structured_output import grammar_of
from app.api.output.tool_calls import ToolUse, tool_use
from app.api.prepared_request import (
    EchoedPrompt,
    PreparedRequest,
    RequestLimits,
    ServedModel,
    SharedFields,
    TokenDetailOptions,
    check_token_ids,
)
from app.api.request_context import TIMINGS_HEADER, RequestContext, is_header_set
from app.api.schemas.conversation import template_messages, template_tools
from app.api.schemas.parameters import refuse_ignored
from app.api.schemas.requests import ChatRequest, CompletionRequest, GenerationRequest, QueuedRequest
from app.engine.request import MIN_TEMPERATURE, MIN_TOP_P, Grammar, Pooling, Request, SamplingParams
from app.errors import ContextTooLong, InvalidRequest
from app.text import Reasoning, Tokenizer
from app.text.text_pairs import EncodedText

SEED_MASK = 2**63 - 1
# A text with more characters than this per token of the context hardly ever fits, so its tokens are counted first.
USUAL_CHARACTERS_PER_TOKEN = 16
# Maximum bytes of a text that may exceed the context because it is truncated or only counted. Encoding takes a second.
MAX_LONGER_TEXT = 1_000_000
MAX_CALL_TOKENS = 1_000_000  # in all prompts of a call, or two contexts if that is more; a token uses 36 bytes
# Body fields that are copied to the `SamplingParams` field of the same name in all requests of the body.
_SHARED_PARAMETERS = {each.name for each in fields(SamplingParams)} & (
    GenerationRequest.model_fields.keys() - {"max_tokens", "seed", "grammar", "prompt_logprobs"}
)


def generates_nothing(model: ServedModel) -> InvalidRequest:
    """Return the error for a request that asks an encoder for text."""
    at = "/v1/rerank or /v1/score" if model.model_info.scores_pairs else "/v1/embeddings, /v1/rerank or /v1/score"
    at = "/v1/classify" if model.model_info.labels else at
    return InvalidRequest(
        f"the model {model.name!r} is an encoder and generates no text; choose another model, or use {at}",
        param="model",
    )


def check_limits(body: GenerationRequest, model: ServedModel, limits: RequestLimits) -> None:
    """Check everything that depends only on the body, the limits and the model info. Raises InvalidRequest."""
    if not model.model_info.generates:
        raise generates_nothing(model)
    for param, asked, most in (
        ("n", body.n, limits.max_choices),
        ("best_of", body.num_samples, limits.max_choices),
        (*body.asked_logprobs, limits.max_logprobs),
        ("prompt_logprobs", body.prompt_logprobs, limits.max_logprobs),
    ):
        if asked is not None and asked > most:
            raise InvalidRequest(f"{param} is {asked:,}; this server accepts at most {most:,}; lower it", param=param)
    param = body.stop_param
    if len(body.stop) > limits.max_stop_strings:
        raise InvalidRequest(
            f"`{param}` contains {len(body.stop):,} strings; this server accepts at most {limits.max_stop_strings:,}; "
            f"send fewer",
            param=param,
        )
    longest = max(map(len, body.stop), default=0)
    if longest > limits.max_stop_length:
        raise InvalidRequest(
            f"`{param}` contains a string of {longest:,} characters; this server accepts at most "
            f"{limits.max_stop_length:,} characters per string; shorten it",
            param=param,
        )
    for param in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        if token_ids := getattr(body, param):
            check_token_ids(token_ids, model, param)


def check_bulk_answer(body: GenerationRequest, *, echo: bool = False) -> None:
    """Raise InvalidRequest if an item of a bulk run asks for several answers, or for more than an answer's text."""
    if body.n != 1:
        raise InvalidRequest(
            f"`n` is {body.n:,}, but an item may have only one answer; write one item per answer", param="n"
        )
    if body.num_samples != 1:
        raise InvalidRequest(
            f"best_of is {body.best_of}, but an item may have only one answer; remove best_of", param="best_of"
        )
    for name, is_asked in (
        ("logprobs", body.asked_logprobs[1] is not None),
        ("prompt_logprobs", body.prompt_logprobs is not None),
        ("return_token_ids", body.return_token_ids),
        ("echo", echo),
    ):
        if is_asked:
            raise InvalidRequest(
                f"bulk runs do not support `{name}`, because results contain only text; remove it", param=name
            )


def shared_fields(body: GenerationRequest, model: ServedModel, context: RequestContext) -> SharedFields:
    """Return the fields shared by all prompts of a body, from `context.shared` if possible. Raises InvalidRequest."""
    if model.name in context.shared:
        return context.shared[model.name]
    check_limits(body, model, context.limits)
    tools, predicted, ignored = None, None, tuple[str, ...]()
    if isinstance(body, ChatRequest):
        tools = tool_use(body, model.tokenizer, model.tool_format) if body.tools else None
        predicted, ignored = body.prediction, _ignored_reasoning_fields(body, model)
    details = TokenDetailOptions(
        logprobs=body.asked_logprobs[1],
        names_are_ids=body.return_tokens_as_token_ids,
        prompt_logprobs=body.prompt_logprobs,
        token_ids=body.return_token_ids,
        echo=isinstance(body, CompletionRequest) and body.echo,
        choose_best=body.num_samples > body.n,
    )
    grammar = grammar_of(body)
    if tools is not None and tools.grammar is not None:  # it includes the request's own grammar where text is allowed
        grammar = tools.grammar
    given = {name: getattr(body, name) for name in _SHARED_PARAMETERS}
    sampling = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()} | {
        "temperature": body.temperature if body.temperature >= MIN_TEMPERATURE else 0.0,
        "top_p": max(body.top_p, MIN_TOP_P),
        "logit_bias": tuple(body.logit_bias.items()),
        "bad_words": _bad_words(body.bad_words, model.tokenizer) if body.bad_words else (),
        "logprobs": 0 if details.logprobs is None and details.choose_best else details.logprobs,
    }
    prediction = () if predicted is None else _encode_prediction(predicted.content, model)
    if context.is_strict:
        refuse_ignored(ignored)
    options = None if details == TokenDetailOptions() else details
    return SharedFields(sampling, grammar, options, tools, prediction, ignored)


def _ignored_reasoning_fields(body: ChatRequest, model: ServedModel) -> tuple[str, ...]:
    """Return the names of the reasoning fields that have no effect on this model."""
    if model.reasoning_marks is not None:
        return ()
    names = [] if body.thinking_token_budget is None else [body.budget_param]
    by_effort = body.reasoning_effort not in (None, "none")
    if by_effort and not any(map(model.tokenizer.has_in_template, ("enable_thinking", "reasoning_effort"))):
        names.append(body.effort_param)
    return tuple(names)


def _encode_prediction(text: str, model: ServedModel) -> tuple[int, ...]:
    """Return the token ids of a predicted output. Raises InvalidRequest if the context cannot hold them."""
    [token_ids] = encode_prompts([text], model, "prediction", add_special_tokens=False)
    if len(token_ids) > model.model_info.max_model_len:
        raise ContextTooLong(
            f"`prediction` has {len(token_ids):,} tokens; this model accepts {model.model_info.max_model_len:,} for "
            f"prompt and output together; shorten the prediction to the expected output",
            param="prediction",
        )
    return token_ids


def encode_prompts(
    prompts: Sequence[str | list[int]],
    model: ServedModel,
    param: str,
    *,
    add_special_tokens: bool,
    may_exceed_context: bool = False,
    cut: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda token_ids: token_ids,
) -> list[tuple[int, ...]]:
    """Return each prompt's token ids after applying `cut`. A prompt is a text or a list of token ids.

    Raises InvalidRequest for ids outside the vocabulary, for more tokens than one call may have, and, unless
    `may_exceed_context` is true, for texts that exceed the context.
    """
    check_texts(
        [each for each in prompts if isinstance(each, str)], model, param, may_exceed_context=may_exceed_context
    )
    for prompt in prompts:
        if not isinstance(prompt, str):
            check_token_ids(prompt, model, param)
    # An error reports the exact number of tokens up to this number.
    most = max(2 * model.model_info.max_model_len, MAX_LONGER_TEXT)
    encoded, num_tokens = list[tuple[int, ...]](), 0
    for prompt in prompts:
        token_ids = (
            model.tokenizer.encode(prompt, add_special_tokens=add_special_tokens, max_tokens=most)
            if isinstance(prompt, str)
            else tuple(prompt)
        )
        encoded.append(cut(token_ids))
        num_tokens += len(encoded[-1])
        if len(encoded) > 1:  # the context limits a single prompt
            check_call_tokens(num_tokens, model, f"the first {len(encoded):,} texts in `{param}`", param)
    return encoded


def check_call_tokens(num_tokens: int, model: ServedModel, what: str, param: str) -> None:
    """Raise InvalidRequest if `num_tokens` exceeds the limit of one call. `what` names the texts in the message."""
    most = max(MAX_CALL_TOKENS, 2 * model.model_info.max_model_len)
    if num_tokens > most:
        raise InvalidRequest(
            f"{what} have {num_tokens:,} tokens; at most {most:,} are accepted in one call; reduce `{param}`",
            param=param,
        )


def check_texts(texts: Sequence[str], model: ServedModel, param: str, *, may_exceed_context: bool = False) -> None:
    """Raise InvalidRequest for texts that clearly exceed the context. Only long texts are encoded for this check."""
    for text in texts:
        _check_text(text, model, param, may_exceed_context=may_exceed_context)


def encode_chat(
    body: ChatRequest, model: ServedModel, tools: ToolUse | None, *, may_exceed_context: bool
) -> tuple[int, ...]:
    """Return the token ids of a chat with its documents and `tools`, rendered by the model's chat template.

    Raises InvalidRequest under the same conditions as `encode_prompts`.
    """
    if body.documents:
        body = body.with_documents_written()
    calls = [call for message in body.messages for call in message.tool_calls or ()]
    if calls:
        check_structure(
            (call.function.arguments.encode() for call in calls),
            "arguments of tool calls",
            param="messages",
            max_values=MAX_STRUCTURE,
        )
    effort, variables = body.reasoning_effort, body.chat_template_kwargs
    if effort is not None:
        variables = {"enable_thinking": effort != "none", "reasoning_effort": effort} | variables
    text = model.tokenizer.render_chat(
        template_messages(body.messages),
        add_generation_prompt=body.add_generation_prompt and not body.continue_final_message,
        continue_final_message=body.continue_final_message,
        tools=None if tools is None else template_tools(body.tools),
        template_variables=variables,
    )
    _check_text(text, model, "messages", may_exceed_context=may_exceed_context)
    most = max(2 * model.model_info.max_model_len, MAX_LONGER_TEXT)
    return model.tokenizer.encode(text, add_special_tokens=body.add_special_tokens, max_tokens=most)


def _check_text(text: str, model: ServedModel, param: str, *, may_exceed_context: bool) -> None:
    """Raise InvalidRequest for a text that the context cannot hold, before the whole text is encoded.

    With `may_exceed_context`, a text may exceed the context, but not `MAX_LONGER_TEXT` bytes.
    """
    max_model_len = model.model_info.max_model_len
    if len(text) <= max_model_len * USUAL_CHARACTERS_PER_TOKEN:
        return
    if may_exceed_context:
        if (num_bytes := len(text.encode())) <= MAX_LONGER_TEXT:
            return
        raise ContextTooLong(
            f"`{param}` contains a text of {num_bytes:,} bytes, but at most {MAX_LONGER_TEXT:,} bytes are accepted, "
            f"and this model accepts at most {max_model_len:,} tokens; shorten the text",
            param=param,
        )
    num_tokens = model.tokenizer.count_up_to(text, 2 * max_model_len)
    if num_tokens > 2 * max_model_len:
        raise ContextTooLong(
            f"`{param}` contains a text of {len(text):,} characters, which is more than {max_model_len:,} tokens; this "
            f"model accepts {max_model_len:,} tokens for prompt and output together; shorten the text",
            param=param,
        )


def prepare_pooling(
    prefix: str,
    body: QueuedRequest,
    model: ServedModel,
    context: RequestContext,
    prompts: Iterable[EncodedText],
    pooling: Pooling | None,
) -> PreparedRequest:
    """Build a request for each prompt that computes a vector or a score but no tokens. The prompts must fit."""
    return prepare_prompts(prefix, body, model, context, prompts, repeat(SamplingParams(max_tokens=0)), pooling)


def prepare_prompts(
    prefix: str,
    body: QueuedRequest,
    model: ServedModel,
    context: RequestContext,
    prompts: Iterable[EncodedText],
    samplings: Iterable[SamplingParams],
    pooling: Pooling | None = None,
) -> PreparedRequest:
    """Build a request for each prompt of a body without generation fields. The prompts must fit the context."""
    response_id, fields = context.response_id(prefix), context.request_fields(body, model)
    requests = [
        Request(
            request_id=f"{response_id}-{index}",
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            pooling=pooling,
            second_text_at=prompt.second_at,
            **fields,
        )
        for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=False))
    ]
    return PreparedRequest(
        response_id=response_id,
        created=int(time.time()),
        model=model,
        requests=tuple(requests),
        num_prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
        max_at_once=context.limits.max_prompts,
    )


def prepare_generation(
    prefix: str,
    body: GenerationRequest,
    model: ServedModel,
    context: RequestContext,
    prompts: Sequence[tuple[int, ...]],
    shared: SharedFields,
    *,
    default_max_tokens: int | None = None,
    echoes: tuple[EchoedPrompt, ...] = (),
    reasoning: Reasoning | None = None,
    form: Callable[[int], Grammar | None] | None = None,
) -> PreparedRequest:
    """Build the requests for a checked body. Raises InvalidRequest if its lengths exceed the context or another limit.

    `form` replaces the shared grammar. It returns the grammar for an output of at most the given number of tokens.
    """
    limits, fields, details = context.limits, context.request_fields(body, model), shared.details
    account, streaming = context.reservation.account, body.stream_options
    longest = None if account.key is None else account.max_tokens(body.asked_tokens, body.length_param)
    lengths = [
        _max_tokens(body, len(prompt), model.model_info.max_model_len, default_max_tokens, longest)
        for prompt in prompts
    ]
    if body.allowed_token_ids:
        _check_allowed_token_ids(body, len(prompts) * body.num_samples, limits.max_allowed_token_ids)
    num_prompt_tokens, num_logprobs = sum(map(len, prompts)), 0
    if body.num_samples > 1:
        param = "n" if body.best_of is None else "best_of"
        choices = f"{body.num_samples:,} choices with {num_prompt_tokens:,} prompt tokens each"
        check_call_tokens(body.num_samples * num_prompt_tokens, model, choices, param)
    if details is not None:
        is_open_ended = body.asked_tokens is None and default_max_tokens is None
        lengths = _with_bounded_logprobs(body, details, lengths, num_prompt_tokens, limits, is_open_ended=is_open_ended)
        num_logprobs = _num_logprobs(body, details, lengths, num_prompt_tokens)
    request_id, requests = context.response_id(prefix), list[Request]()  # each attempt needs a new id
    response_id, created = context.stored_as or (request_id, int(time.time()))
    for prompt, max_tokens in zip(prompts, lengths, strict=True):
        seed = secrets.randbits(63) if body.seed is None else body.seed & SEED_MASK
        for sample in range(body.num_samples):
            sampling = SamplingParams(
                max_tokens=max_tokens,
                # Sample 0 uses the seed itself, so n=1 and the first sample of n=4 have the same output.
                seed=_sample_seed(seed, sample) if sample else seed,
                grammar=shared.grammar if form is None else form(max_tokens),
                prompt_logprobs=None if details is None else _scored_logprobs(details, is_first=sample == 0),
                **shared.sampling,
            )
            requests.append(
                Request(
                    request_id=f"{request_id}-{len(requests)}",
                    prompt_token_ids=prompt,
                    sampling=sampling,
                    prediction_token_ids=shared.prediction,
                    **fields,
                )
            )
    include_usage = streaming is not None and bool(streaming.include_usage)
    wants_timings = is_header_set(context.headers, TIMINGS_HEADER)
    return PreparedRequest(
        response_id=response_id,
        created=created,
        model=model,
        requests=tuple(requests),
        num_prompt_tokens=num_prompt_tokens,
        num_logprobs=num_logprobs,
        ignored=shared.ignored,
        num_samples=body.num_samples,
        num_choices=body.n,
        echoes=echoes,
        stop=tuple(body.stop),
        stop_tokens=model.tokenizer.special_tokens_in(body.stop) if body.stop else {},
        skip_special_tokens=body.skip_special_tokens,
        include_stop=body.include_stop_str_in_output or body.no_stop_trim,
        detail_options=details,
        include_usage=include_usage or wants_timings,
        continuous_usage=include_usage and streaming is not None and bool(streaming.continuous_usage_stats),
        reasoning=reasoning,
        tools=shared.tools,
        wants_timings=wants_timings,
    )


def _check_allowed_token_ids(body: GenerationRequest, num_requests: int, most: int) -> None:
    number = len(body.allowed_token_ids)
    if number * num_requests > most:
        raise InvalidRequest(
            f"allowed_token_ids has {number:,} ids for each of {num_requests:,} requests; this server accepts "
            f"{most:,} ids in all requests together; send fewer ids, prompts or choices",
            param="allowed_token_ids",
        )


def _num_logprobs(
    body: GenerationRequest, details: TokenDetailOptions, lengths: Sequence[int], num_prompt_tokens: int
) -> int:
    """Return the maximum number of log-probabilities in an answer, for generated, echoed and prompt tokens."""
    num_tokens = 0
    if details.logprobs is not None:
        num_tokens = body.num_samples * (sum(lengths) + (num_prompt_tokens if details.echo else 0))
    num_scored = 0 if details.prompt_logprobs is None else num_prompt_tokens * (1 + details.prompt_logprobs)
    return num_tokens * (1 + (details.logprobs or 0)) + num_scored


def _with_bounded_logprobs(
    body: GenerationRequest,
    details: TokenDetailOptions,
    lengths: list[int],
    num_prompt_tokens: int,
    limits: RequestLimits,
    *,
    is_open_ended: bool,
) -> list[int]:
    """Return lengths that keep the log-probabilities within their limit.

    Only lengths that the client did not set are lowered. Raises InvalidRequest if the limit is still exceeded.
    """
    most, num_logprobs = limits.max_answer_logprobs, _num_logprobs(body, details, lengths, num_prompt_tokens)
    if num_logprobs <= most:
        return lengths
    num_requests, num_tokens = len(lengths) * body.num_samples, lengths[0]
    param, num_top = body.asked_logprobs
    if num_top is not None and is_open_ended:  # an open-ended body has one prompt, so its samples share a length
        num_per_length = num_requests * (1 + num_top)
        longest = (most - num_logprobs + num_per_length * num_tokens) // num_per_length
        if longest >= max(1, body.min_tokens):
            return [min(longest, length) for length in lengths]
    if num_top is None:
        param = "prompt_logprobs"
    raise InvalidRequest(
        f"the answer could have {num_logprobs:,} log-probabilities: {num_requests:,} choices of up to "
        f"{num_tokens:,} tokens and {num_prompt_tokens:,} prompt tokens, each with its most likely tokens; this "
        f"server accepts {most:,}; lower {param}, {body.length_param} or `n`, or send fewer or shorter prompts",
        param=param,
    )


def _scored_logprobs(details: TokenDetailOptions, *, is_first: bool) -> int | None:
    """Return the number of likeliest tokens to report for each prompt token, or None for no log-probabilities.

    vLLM's format contains `prompt_logprobs` once per prompt, so only a prompt's first sample requests them.
    """
    echoed = details.logprobs if details.echo else None
    wanted = [num for num in (echoed, details.prompt_logprobs if is_first else None) if num is not None]
    return max(wanted, default=None)


def chat_prompt(body: ChatRequest, model: ServedModel, limits: RequestLimits) -> tuple[int, ...]:
    """Return the token ids of a chat's prompt, even if the prompt is too long for the model. Raises InvalidRequest."""
    if model.model_info.generates:
        check_limits(body, model, limits)
    tools = tool_use(body, model.tokenizer, model.tool_format) if body.tools else None
    return truncated(encode_chat(body, model, tools, may_exceed_context=True), body, model)


def truncated(prompt: tuple[int, ...], body: GenerationRequest, model: ServedModel) -> tuple[int, ...]:
    """Return the prompt truncated to `truncate_prompt_tokens`, or, if that is -1, to the space left by the output."""
    num_kept = body.truncate_prompt_tokens
    if num_kept == -1:
        num_kept = max(1, model.model_info.max_model_len - (1 if body.asked_tokens is None else body.asked_tokens))
    if num_kept is None:
        return prompt
    return prompt[:num_kept] if body.truncation_side == "right" else prompt[-num_kept:]


def _max_tokens(
    body: GenerationRequest, num_prompt_tokens: int, max_model_len: int, default: int | None, longest: int | None
) -> int:
    """Return the maximum output length of one request: the requested length, the default, or the rest of the context.

    `longest` is the API key's limit. Raises InvalidRequest if the prompt and the output do not fit.
    """
    param = body.prompt_param
    if num_prompt_tokens == 0:
        raise InvalidRequest(f"`{param}` has no tokens; send at least one", param=param)
    room = max_model_len - num_prompt_tokens
    asked = body.asked_tokens
    if asked is not None and asked > room:
        raise ContextTooLong(
            f"the prompt has {num_prompt_tokens:,} tokens and {body.length_param} is {asked:,}; this model accepts "
            f"{max_model_len:,} tokens in total; shorten the prompt or lower {body.length_param}",
            param=param if room < 1 else body.length_param,
        )
    if room < 1 and asked != 0:
        raise ContextTooLong(
            f"the prompt has {num_prompt_tokens:,} tokens; this model accepts {max_model_len:,} tokens, including at "
            f"least one output token; shorten the prompt",
            param=param,
        )
    max_tokens = min(room, default or room) if asked is None else asked
    if body.min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens is {body.min_tokens:,} and {body.length_param} is {max_tokens:,}; lower min_tokens",
            param="min_tokens",
        )
    if longest is None or max_tokens <= longest:
        return max_tokens
    if body.min_tokens > longest:
        raise InvalidRequest(
            f"min_tokens is {body.min_tokens:,}; this API key may request at most {longest:,}", param="min_tokens"
        )
    return longest


def _sample_seed(seed: int, sample: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") & SEED_MASK


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word, both at the start of a text and after a space."""
    encoded = tokenizer.encode_all([text for word in words for text in (word, f" {word.lstrip()}")])
    return tuple(dict.fromkeys(token_ids for token_ids in encoded if token_ids))
