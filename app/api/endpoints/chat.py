"""POST /v1/chat/completions."""

from __future__ import annotations

from app.api.call import Call, RequestLimits, ServedModel
from app.api.generation import call_of, check_limits, encode_chat
from app.api.output.tool_calls import tool_use
from app.api.schemas.requests import ChatRequest


async def prepare_chat(body: ChatRequest, model: ServedModel, limits: RequestLimits) -> Call:
    """Check and tokenize a chat. Raises InvalidRequest."""
    check_limits(body, model, limits)
    tools = tool_use(body, model.tokenizer, model.tool_format)
    prompt = await encode_chat(
        body, model, with_tools=tools is not None, continue_final_message=body.continue_final_message
    )
    return call_of("chatcmpl", body, model, limits, [prompt], default_max_tokens=None, tools=tools)
