"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace

from app.api.call import Call, RequestLimits, ServedModel
from app.api.generation import SharedFields, call_of, encode_chat, shared_fields
from app.api.schemas.requests import ChatRequest
from app.text import Reasoning

_MAX_MARK_TOKENS = 16  # of a mark and the line end behind it


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
    call = call_of("chatcmpl", body, model, limits, [prompt], shared, default_max_tokens=None)
    return replace(call, reasoning=_reasoning(body, model, prompt, has_grammar=shared.sampling.grammar is not None))


def _reasoning(
    body: ChatRequest, model: ServedModel, prompt: tuple[int, ...], *, has_grammar: bool
) -> Reasoning | None:
    """How reasoning is found in the output: some templates begin it at the end of the prompt, a last message may."""
    marks = model.reasoning_marks
    if marks is None or has_grammar:
        return None
    if body.continue_final_message:
        return Reasoning(marks=marks, is_open=marks.are_open(body.messages[-1].content or ""))
    end = model.tokenizer.decode(prompt[-_MAX_MARK_TOKENS:], skip_special_tokens=False)
    return Reasoning(marks=marks, is_open=end.rstrip().endswith(marks.begin))
