"""Words to token ids and back, for clients that count or score tokens themselves: the use cases, as vLLM has them."""

from __future__ import annotations

from typing import Any

from app.api.endpoints.completions import ServedModel, check_token_ids, off_the_loop
from app.api.schemas.requests import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest, template_messages


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
        num_characters=sum(message.num_characters for message in body.messages) + len(str(tools)),
    )
