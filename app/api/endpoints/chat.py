"""POST /v1/chat/completions."""

from __future__ import annotations

from app.api.call import Call, RequestLimits, ServedModel
from app.api.generation import SharedFields, call_of, encode_chat, shared_fields
from app.api.schemas.requests import ChatRequest


def prepare_chat(
    body: ChatRequest, model: ServedModel, limits: RequestLimits, shared: SharedFields | None = None
) -> Call:
    """Check and tokenize a chat. `shared` is known where another body has the same. Raises InvalidRequest."""
    shared = shared or shared_fields(body, model, limits)
    prompt = encode_chat(
        body,
        model,
        with_tools=shared.tools is not None,
        continue_final_message=body.continue_final_message,
        may_be_longer=body.truncate_prompt_tokens is not None,
    )
    return call_of("chatcmpl", body, model, limits, [prompt], shared, default_max_tokens=None)
