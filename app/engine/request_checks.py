"""Checks whether a model can ever serve a request, regardless of the current load."""

from __future__ import annotations

from collections.abc import Iterator

from app.engine.request import (
    MAX_GRAMMAR_CHARACTERS,
    Grammar,
    ModelInfo,
    Pooling,
    Request,
    SamplingParams,
)
from app.errors import ContextTooLong, InvalidRequest


def check_request(request: Request, model_info: ModelInfo) -> None:
    """Raise InvalidRequest if an engine with this model can never serve the request."""
    _check_lengths(request, model_info)
    _check_logprobs(request.sampling, model_info)
    _check_pooling(request, model_info)
    if request.sampling.grammar is not None:
        _check_grammar(request.sampling.grammar, request.sampling, model_info)
    _check_token_ids(request, model_info)


def _check_lengths(request: Request, model_info: ModelInfo) -> None:
    num_prompt, max_tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    if num_prompt == 0:
        raise InvalidRequest("the prompt is empty; send at least one token", param="prompt")
    if max_tokens < 0:
        raise InvalidRequest(f"max_tokens is {max_tokens}; it must be at least 0", param="max_tokens")
    if 0 < max_tokens <= len(request.generated_token_ids):
        raise InvalidRequest(
            f"{len(request.generated_token_ids):,} tokens have already been generated and max_tokens is "
            f"{max_tokens:,}, so nothing is left to generate; raise it",
            param="max_tokens",
        )
    if num_prompt + max_tokens > model_info.max_model_len:
        raise ContextTooLong(
            f"the prompt has {num_prompt:,} tokens and max_tokens is {max_tokens:,}; "
            f"this model accepts {model_info.max_model_len:,} tokens in total",
            param="max_tokens",
        )


def _check_logprobs(sampling: SamplingParams, model_info: ModelInfo) -> None:
    for name, num_top in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
        if num_top is not None and not 0 <= num_top <= model_info.vocab_size:
            raise InvalidRequest(f"{name} is {num_top}; it must be from 0 to {model_info.vocab_size:,}", param=name)


def _check_pooling(request: Request, model_info: ModelInfo) -> None:
    pooling = request.pooling
    if pooling is None:
        if not model_info.generates:
            raise InvalidRequest("this model is an encoder and generates no text; choose another model", param="model")
        return
    if pooling.uses_head and not (model_info.scores_pairs or model_info.labels):
        raise InvalidRequest("this model does not support scores for pairs or labels; choose another", param="model")
    if not pooling.uses_head and model_info.embedding_size is None:
        raise InvalidRequest("this model does not support embeddings; choose another model", param="model")
    if pooling == Pooling.CLS and model_info.generates:
        raise InvalidRequest(
            "this model generates text, but CLS pooling requires an encoder; choose one", param="model"
        )
    if request.sampling.max_tokens:
        raise InvalidRequest(
            f"max_tokens is {request.sampling.max_tokens}; it must be 0 in a request for an embedding or a score",
            param="max_tokens",
        )
    if request.second_text_at and not 0 < request.second_text_at < len(request.prompt_token_ids):
        raise InvalidRequest(
            f"second_text_at is {request.second_text_at}; it must be above 0 and below the prompt's "
            f"{len(request.prompt_token_ids):,} tokens",
            param="prompt",
        )


def _check_grammar(grammar: Grammar, sampling: SamplingParams, model_info: ModelInfo) -> None:
    if len(grammar.text) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequest(
            f"{grammar.param} has {len(grammar.text):,} characters; at most {MAX_GRAMMAR_CHARACTERS:,} are accepted",
            param=grammar.param,
        )
    if sampling.allowed_token_ids:
        raise InvalidRequest(
            f"allowed_token_ids and {grammar.param} cannot be combined; send only one of them",
            param="allowed_token_ids",
        )
    if not model_info.eos_token_ids:
        raise InvalidRequest(
            f"this model has no end token, so an output with a grammar could never end; remove {grammar.param}",
            param=grammar.param,
        )


def _check_token_ids(request: Request, model_info: ModelInfo) -> None:
    for name, token_ids in _token_ids(request):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < model_info.vocab_size):
            wrong = next(token for token in token_ids if not 0 <= token < model_info.vocab_size)
            raise InvalidRequest(
                f"{name} contains the token id {wrong}; this model's token ids are 0 to {model_info.vocab_size - 1:,}",
                param=name,
            )


def _token_ids(request: Request) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and content of each request field that contains token ids."""
    sampling = request.sampling
    yield "prompt", request.prompt_token_ids
    yield "generated_token_ids", request.generated_token_ids
    yield "prediction", request.prediction_token_ids
    yield "logit_bias", tuple(token for token, _ in sampling.logit_bias)
    yield "stop_token_ids", sampling.stop_token_ids
    yield "allowed_token_ids", sampling.allowed_token_ids
    yield "logprob_token_ids", sampling.logprob_token_ids
    yield "bad_words", tuple(token for word in sampling.bad_words for token in word)
