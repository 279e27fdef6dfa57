"""POST /tokenize and /detokenize, GET /tokenizer_info, as vLLM has them: for clients that count or score tokens."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from app.api.call import ServedModel, check_token_ids, off_the_loop
from app.api.generation import encode_chat, encode_prompts
from app.api.handler import RequestHandler
from app.api.http.answers import JsonAnswer
from app.api.http.body import read_json_object
from app.api.http.guard import reservation_of
from app.api.http.headers import is_strict
from app.api.schemas.requests import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from app.json_pieces import Rows


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
        """POST /tokenize: the ids of a text or of a conversation in the model's template, beside their number."""
        body = await read_json_object(request, self._handler.limits)
        strict = is_strict(request.headers)
        parsed: TokenizeTextRequest | TokenizeChatRequest
        if body.get("messages") is None:
            parsed = self._handler.parse(body, TokenizeTextRequest, is_strict=strict)
        else:
            parsed = self._handler.parse(body, TokenizeChatRequest, is_strict=strict)
        model = self._model(request, parsed.model)
        if isinstance(parsed, TokenizeTextRequest):
            special = parsed.add_special_tokens
            [token_ids] = await encode_prompts([parsed.prompt], model, "prompt", add_special_tokens=special)
        else:
            token_ids = await encode_chat(parsed, model, with_tools=True)
        answer = {
            "count": len(token_ids),
            "max_model_len": model.facts.max_model_len,
            "tokens": Rows.of(token_ids),
            "token_strs": Rows.of(token_ids, model.tokenizer.token_texts) if parsed.return_token_strs else None,
        }
        return JsonAnswer(answer, self._handler.turns)

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize: the text of token ids, special ones included."""
        body = await read_json_object(request, self._handler.limits)
        parsed = self._handler.parse(body, DetokenizeRequest, is_strict=is_strict(request.headers))
        model, token_ids = self._model(request, parsed.model), parsed.tokens
        check_token_ids(token_ids, model, "tokens")
        text = await off_the_loop(
            lambda: model.tokenizer.decode(token_ids, skip_special_tokens=False), num_characters=len(token_ids)
        )
        return JsonAnswer({"prompt": text}, self._handler.turns)

    async def tokenizer_info(self, request: Request) -> Response:
        """GET /tokenizer_info, for clients that apply the chat template themselves. `?model=` names the model."""
        return JSONResponse(self._model(request, request.query_params.get("model")).tokenizer.description())

    def _model(self, request: Request, name: str | None) -> ServedModel:
        return self._handler.model(name, reservation_of(request).account)
