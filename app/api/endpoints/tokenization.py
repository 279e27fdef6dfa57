"""For clients that count or score tokens: POST /tokenize and /detokenize, GET /tokenizer_info, as vLLM has them.

And POST /v1/messages/count_tokens, as Anthropic has it.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from app.api.generation import encode_chat, encode_prompts
from app.api.handler import ParsedT, RequestHandler
from app.api.http.answers import JsonAnswer
from app.api.http.body import read_json_object
from app.api.http.errors import MESSAGES_PATH
from app.api.http.guard import reservation_of
from app.api.http.operations import OF_A_BODY, OF_A_MODEL, TEXT, Operation, RouteGroup
from app.api.json_structure import size_of
from app.api.prepared_request import ServedModel, check_token_ids
from app.api.request_context import asks_for
from app.api.schemas.messages import CountTokensRequest
from app.api.schemas.parameters import STRICT_HEADER
from app.api.schemas.requests import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from app.api.threads import MAX_SMALL_SIZE
from app.json_pieces import Json, Rows


class TokenizationRoutes(RouteGroup):
    """The routes."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler

    @Operation(
        "post", "/tokenize", "Words to token ids", "Tokens", OF_A_BODY, (TokenizeTextRequest, TokenizeChatRequest)
    )
    async def tokenize(self, request: Request) -> Response:
        """The ids of a text or of a conversation in the model's template, beside their number."""
        body = await read_json_object(request, self._handler.limits, self._handler.threads)
        schema = TokenizeTextRequest if body.get("messages") is None else TokenizeChatRequest
        parsed: TokenizeTextRequest | TokenizeChatRequest = await self._parsed(request, body, schema)
        model = self._model(request, parsed.model)
        return await self._answer(request, size_of(body, MAX_SMALL_SIZE), lambda: _tokenized(parsed, model))

    @Operation("post", "/detokenize", "Token ids to words", "Text", OF_A_BODY, (DetokenizeRequest,))
    async def detokenize(self, request: Request) -> Response:
        """The text of token ids, special ones included."""
        body = await read_json_object(request, self._handler.limits, self._handler.threads)
        parsed = await self._parsed(request, body, DetokenizeRequest)
        model, token_ids = self._model(request, parsed.model), parsed.tokens

        def detokenized() -> Json:
            check_token_ids(token_ids, model, "tokens")
            return {"prompt": model.tokenizer.decode(token_ids, skip_special_tokens=False)}

        return await self._answer(request, len(token_ids), detokenized)

    @Operation(
        "post", f"{MESSAGES_PATH}/count_tokens", "The number of tokens of a prompt", "TokenCount", OF_A_BODY,
        (CountTokensRequest,),
    )  # fmt: skip
    async def count_tokens(self, request: Request) -> Response:
        """How many tokens the prompt of a message has."""
        body = await read_json_object(request, self._handler.limits, self._handler.threads)
        parsed = await self._parsed(request, body, CountTokensRequest)
        model = self._model(request, parsed.model)

        def counted() -> Json:
            token_ids = encode_chat(
                parsed.as_conversation(),
                model,
                with_tools=parsed.offers_tools,
                continue_final_message=parsed.is_continued,
                may_be_longer=True,
            )
            return {"input_tokens": len(token_ids)}

        return await self._answer(request, size_of(body, MAX_SMALL_SIZE), counted)

    @Operation(
        "get", "/tokenizer_info", "Special tokens, chat template", "TokenizerInfo", OF_A_MODEL,
        query={"model": {"schema": TEXT, "description": "required where there are several"}},
    )  # fmt: skip
    async def tokenizer_info(self, request: Request) -> Response:
        """For clients that apply the chat template themselves."""
        return JSONResponse(self._model(request, request.query_params.get("model")).tokenizer.description())

    async def _parsed(self, request: Request, body: Json, schema: type[ParsedT]) -> ParsedT:
        account = reservation_of(request).account
        size = size_of(body, MAX_SMALL_SIZE)
        return await self._handler.parse(
            body, size, schema, account, is_strict=asks_for(request.headers, STRICT_HEADER)
        )

    async def _answer(self, request: Request, size: int, make: Callable[[], Json]) -> Response:
        """What `make` makes of a body of this size."""
        tenant = reservation_of(request).account.name
        return JsonAnswer(await self._handler.threads.encode(tenant, size, make), self._handler.turns)

    def _model(self, request: Request, name: str | None) -> ServedModel:
        return self._handler.names.model(name, reservation_of(request).account)


def _tokenized(body: TokenizeTextRequest | TokenizeChatRequest, model: ServedModel) -> Json:
    if isinstance(body, TokenizeTextRequest):
        [token_ids] = encode_prompts(
            [body.prompt], model, "prompt", add_special_tokens=body.add_special_tokens, may_be_longer=True
        )
    else:
        token_ids = encode_chat(body, model, with_tools=True, may_be_longer=True)
    return {
        "count": len(token_ids),
        "max_model_len": model.facts.max_model_len,
        "tokens": Rows.of(token_ids),
        "token_strs": Rows.of(token_ids, model.tokenizer.token_texts) if body.return_token_strs else None,
    }
