"""POST /tokenize and /detokenize, GET /tokenizer_info, as vLLM has them: for clients that count or score tokens."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.api.call import ServedModel, check_token_ids, off_the_loop
from app.api.handler import RequestHandler
from app.api.http.body import read_json_object
from app.api.http.guard import reservation_of
from app.api.http.headers import is_strict
from app.api.schemas.requests import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest, template_messages


class TokenizationRoutes:
    """The routes."""

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler

    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
            Route("/tokenizer_info", self.tokenizer_info, methods=["GET"]),
        ]

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        body = await read_json_object(request, self._handler.limits)
        strict = is_strict(request.headers)
        parsed: TokenizeTextRequest | TokenizeChatRequest
        if body.get("messages") is None:
            parsed = self._handler.parse(body, TokenizeTextRequest, is_strict=strict)
        else:
            parsed = self._handler.parse(body, TokenizeChatRequest, is_strict=strict)
        return JSONResponse(await tokenize(parsed, self._model(request, parsed.model)))

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        body = await read_json_object(request, self._handler.limits)
        parsed = self._handler.parse(body, DetokenizeRequest, is_strict=is_strict(request.headers))
        return JSONResponse(await detokenize(parsed, self._model(request, parsed.model)))

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info, for clients that apply the chat template themselves. `?model=` names the model."""
        return JSONResponse(self._model(request, request.query_params.get("model")).tokenizer.description())

    def _model(self, request: Request, name: str | None) -> ServedModel:
        return self._handler.model(name, reservation_of(request).account)


async def tokenize(body: TokenizeTextRequest | TokenizeChatRequest, model: ServedModel) -> dict[str, Any]:
    """The ids of a text or of a conversation in the model's template, beside their number. Raises InvalidRequest."""
    token_ids = await (_of_text(body, model) if isinstance(body, TokenizeTextRequest) else _of_chat(body, model))
    return {
        "count": len(token_ids),
        "max_model_len": model.facts.max_model_len,
        "tokens": list(token_ids),
        "token_strs": model.tokenizer.token_texts(token_ids) if body.return_token_strs else None,
    }


async def detokenize(body: DetokenizeRequest, model: ServedModel) -> dict[str, Any]:
    """The text of token ids, special ones included. Raises InvalidRequest for ids that the model does not have."""
    check_token_ids(body.tokens, model, "tokens")
    text = await off_the_loop(
        lambda: model.tokenizer.decode(body.tokens, skip_special_tokens=False), num_characters=len(body.tokens)
    )
    return {"prompt": text}


async def _of_text(body: TokenizeTextRequest, model: ServedModel) -> tuple[int, ...]:
    return await off_the_loop(
        lambda: model.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens),
        num_characters=len(body.prompt),
    )


async def _of_chat(body: TokenizeChatRequest, model: ServedModel) -> tuple[int, ...]:
    messages = template_messages(body.messages)
    tools = [tool.for_template() for tool in body.tools]
    return await off_the_loop(
        lambda: model.tokenizer.encode_chat(
            messages,
            add_generation_prompt=body.add_generation_prompt,
            add_special_tokens=body.add_special_tokens,
            tools=tools,
            template_variables=body.chat_template_kwargs,
        ),
        num_characters=sum(message.num_characters for message in body.messages)
        + len(str(tools))
        + len(str(body.chat_template_kwargs)),
    )
