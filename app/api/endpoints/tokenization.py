"""Routes for clients that count tokens: vLLM's POST /tokenize, POST /detokenize and GET /tokenizer_info.

POST /v1/messages/count_tokens is Anthropic's route for the same purpose.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.generation import chat_prompt, encode_prompts
from app.api.handler import ParsedT, RequestHandler
from app.api.http.answers import JsonAnswer
from app.api.http.body import read_json_object
from app.api.http.errors import MESSAGES_PATH
from app.api.http.guard import reservation_of
from app.api.http.operations import BODY_REFUSALS, MODEL_REFUSALS, TEXT, Operation, RouteGroup
from app.api.json_structure import size_of
from app.api.prepared_request import RequestLimits, ServedModel, check_token_ids
from app.api.request_context import is_header_set
from app.api.schemas.messages import CountTokensRequest
from app.api.schemas.parameters import STRICT_HEADER, ignored_fields, ignored_header
from app.api.schemas.requests import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from app.api.threads import MAX_SMALL_SIZE
from app.json_pieces import Json, Rows


class TokenizationRoutes(RouteGroup):
    """The routes that encode and decode tokens."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler

    @Operation(
        "post", "/tokenize", "Text to token ids", "Tokens", BODY_REFUSALS, (TokenizeTextRequest, TokenizeChatRequest)
    )
    async def tokenize(self, request: Request) -> Response:
        """Return the token ids of a text or of a chat's prompt, and their number."""
        body = await self._body(request)
        if body.get("messages") is None:
            return await self._answer(request, body, TokenizeTextRequest, _tokenized_text)
        make = partial(_tokenized_chat, limits=self._handler.limits)
        return await self._answer(request, body, TokenizeChatRequest, make)

    @Operation("post", "/detokenize", "Token ids to text", "Text", BODY_REFUSALS, (DetokenizeRequest,))
    async def detokenize(self, request: Request) -> Response:
        """Return the text of token ids, including special tokens."""
        return await self._answer(request, await self._body(request), DetokenizeRequest, _detokenized)

    @Operation(
        "post", f"{MESSAGES_PATH}/count_tokens", "The number of tokens of a prompt", "TokenCount", BODY_REFUSALS,
        (CountTokensRequest,),
    )  # fmt: skip
    async def count_tokens(self, request: Request) -> Response:
        """Return the number of prompt tokens of a Messages request."""
        make = partial(_counted, limits=self._handler.limits)
        return await self._answer(request, await self._body(request), CountTokensRequest, make)

    @Operation(
        "get", "/tokenizer_info", "Special tokens, chat template", "TokenizerInfo", MODEL_REFUSALS,
        query={"model": {"schema": TEXT, "description": "required if the server has several models"}},
    )  # fmt: skip
    async def tokenizer_info(self, request: Request) -> Response:
        """Return the special tokens and the chat template, for clients that apply the template themselves."""
        return JSONResponse(self._model(request, request.query_params.get("model")).tokenizer.description())

    async def _body(self, request: Request) -> Json:
        return await read_json_object(request, self._handler.limits, self._handler.threads)

    async def _answer(
        self, request: Request, body: Json, schema: type[ParsedT], make: Callable[[ParsedT, ServedModel], Json]
    ) -> Response:
        """Check a body and respond with the result of `make`. A response header names the ignored fields."""
        handler, account, size = self._handler, reservation_of(request).account, size_of(body, MAX_SMALL_SIZE)
        is_strict = is_header_set(request.headers, STRICT_HEADER)
        parsed = await handler.parse(body, size, schema, account, is_strict=is_strict)
        model = self._model(request, parsed.model)
        content = await handler.threads.encode(account.name, size, lambda: make(parsed, model))
        return JsonAnswer(content, handler.turns, headers=ignored_header(ignored_fields(body, parsed)))

    def _model(self, request: Request, name: str | None) -> ServedModel:
        return self._handler.names.model(name, reservation_of(request).account)


def _tokenized_text(body: TokenizeTextRequest, model: ServedModel) -> Json:
    [token_ids] = encode_prompts(
        [body.prompt], model, "prompt", add_special_tokens=body.add_special_tokens, may_exceed_context=True
    )
    return _tokens(token_ids, model, with_texts=body.return_token_strs)


def _tokenized_chat(body: TokenizeChatRequest, model: ServedModel, limits: RequestLimits) -> Json:
    return _tokens(chat_prompt(body, model, limits), model, with_texts=body.return_token_strs)


def _tokens(token_ids: tuple[int, ...], model: ServedModel, *, with_texts: bool) -> Json:
    return {
        "count": len(token_ids),
        "max_model_len": model.model_info.max_model_len,
        "tokens": Rows.of(token_ids),
        "token_strs": Rows.of(token_ids, model.tokenizer.token_texts) if with_texts else None,
    }


def _detokenized(body: DetokenizeRequest, model: ServedModel) -> Json:
    check_token_ids(body.tokens, model, "tokens")
    return {"prompt": model.tokenizer.decode(body.tokens, skip_special_tokens=False)}


def _counted(body: CountTokensRequest, model: ServedModel, limits: RequestLimits) -> Json:
    return {"input_tokens": len(chat_prompt(body.as_chat(), model, limits))}
