"""POST /v1/chat/completions."""

from __future__ import annotations

from app.api.call import Call, RequestLimits, ServedModel, off_the_loop
from app.api.generation import call_of, check_limits
from app.api.output.tool_calls import tool_use
from app.api.schemas.requests import ChatRequest, template_messages


async def prepare_chat(body: ChatRequest, model: ServedModel, limits: RequestLimits) -> Call:
    """Check and tokenize a chat. Raises InvalidRequest."""
    check_limits(body, model, limits)
    tools = tool_use(body, model.tokenizer, model.tool_format)
    messages = template_messages(body.messages)
    offered = [tool.for_template() for tool in body.tools] if tools else None

    def encode() -> list[tuple[int, ...]]:
        return [
            model.tokenizer.encode_chat(
                messages,
                add_generation_prompt=body.begins_message,
                continue_final_message=body.continue_final_message,
                add_special_tokens=body.add_special_tokens,
                tools=offered,
                template_variables=body.chat_template_kwargs,
            )
        ]

    num_characters = sum(message.num_characters for message in body.messages)
    num_characters += len(str(offered or "")) + len(str(body.chat_template_kwargs))
    prompts = await off_the_loop(encode, num_characters)
    return call_of("chatcmpl", body, model, prompts, default_max_tokens=None, tools=tools)
