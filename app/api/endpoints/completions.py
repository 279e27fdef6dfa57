"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from app.api.endpoints.endpoint import Endpoint
from app.api.generation import check_bulk_answer, encode_prompts, prepare_generation, shared_fields, truncated
from app.api.output.completion_writers import ChoiceWriter, Completion, CompletionFormat
from app.api.prepared_request import EchoedPrompt, PreparedRequest, ServedModel
from app.api.request_context import RequestContext
from app.api.schemas.requests import CompletionRequest
from app.batches import COMPLETIONS_PATH
from app.errors import InvalidRequest


def prepare_completion(body: CompletionRequest, model: ServedModel, context: RequestContext) -> PreparedRequest:
    """Check and tokenize one or more prompts. Raises InvalidRequest."""
    limits, shared = context.limits, shared_fields(body, model, context)
    if len(body.prompt) > limits.max_prompts:
        raise InvalidRequest(
            f"`prompt` contains {len(body.prompt):,} prompts; this server accepts at most {limits.max_prompts:,} in "
            f"one call; send fewer",
            param="prompt",
        )
    num_requests, param = len(body.prompt) * body.num_samples, "n" if body.best_of is None else "best_of"
    if num_requests > limits.max_prompts:
        raise InvalidRequest(
            f"{len(body.prompt):,} prompts with `{param}` set to {body.num_samples:,} request {num_requests:,} "
            f"choices; this server accepts at most {limits.max_prompts:,} in one call; send fewer prompts or lower "
            f"`{param}`",
            param=param,
        )
    if body.documents:
        body = body.with_documents_written()
    prompts = encode_prompts(
        body.prompt,
        model,
        "prompt",
        add_special_tokens=body.add_special_tokens,
        may_exceed_context=body.truncate_prompt_tokens is not None,
        cut=partial(truncated, body=body, model=model),
    )
    echoes = _echoes(body, model, prompts) if body.echo else ()
    default_max_tokens = 16  # OpenAI's default; a chat may use the rest of the context
    return prepare_generation(
        "cmpl-", body, model, context, prompts, shared, default_max_tokens=default_max_tokens, echoes=echoes
    )


def check_bulk_completion(body: CompletionRequest) -> None:
    """Raise InvalidRequest if a bulk run cannot answer this item with one text."""
    check_bulk_answer(body, echo=body.echo)
    if len(body.prompt) != 1:
        message = (
            f"`prompt` contains {len(body.prompt):,} prompts, but an item may have only one; write one item per prompt"
        )
        raise InvalidRequest(message, param="prompt")


def _echoes(
    body: CompletionRequest, model: ServedModel, prompts: Sequence[tuple[int, ...]]
) -> tuple[EchoedPrompt, ...]:
    """Return each prompt's echo: the text as sent, or the decoded ids if the prompt was truncated or sent as ids."""
    is_cut = body.truncate_prompt_tokens is not None
    added, _ = model.tokenizer.added_around if body.add_special_tokens else ((), ())

    def echo(given: str | list[int], token_ids: tuple[int, ...]) -> EchoedPrompt:
        num_added_tokens = len(added) if isinstance(given, str) and token_ids[: len(added)] == added else 0
        if isinstance(given, str) and not is_cut:
            return EchoedPrompt(given, num_added_tokens)
        return EchoedPrompt(
            model.tokenizer.decode(token_ids[num_added_tokens:], skip_special_tokens=False), num_added_tokens
        )

    return tuple(echo(given, token_ids) for given, token_ids in zip(body.prompt, prompts, strict=True))


COMPLETIONS = Endpoint(
    COMPLETIONS_PATH,
    CompletionRequest,
    prepare_completion,
    lambda _: ChoiceWriter(CompletionFormat()),
    summary="Continue a text",
    response=Completion,
    check_bulk=check_bulk_completion,
)
