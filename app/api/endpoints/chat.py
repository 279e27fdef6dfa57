"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from app.api.endpoints.endpoint import Endpoint
from app.api.generation import check_bulk_answer, encode_chat, prepare_generation, shared_fields, truncated
from app.api.output.completion_writers import ChatCompletion, ChatFormat, ChoiceWriter
from app.api.prepared_request import PreparedRequest, ServedModel
from app.api.request_context import RequestContext
from app.api.schemas.fields import ReasoningEffort
from app.api.schemas.requests import ChatRequest
from app.batches import CHATS_PATH
from app.engine.request import Grammar, GrammarKind, Thought
from app.errors import InvalidRequest
from app.text import Reasoning, ReasoningMarks

# The share of the output that reasoning may use, by effort. The numbers are OpenRouter's.
_EFFORTS: dict[ReasoningEffort, float] = {
    "none": 0, "minimal": 0.1, "low": 0.2, "medium": 0.5, "high": 0.8, "xhigh": 0.95,
}  # fmt: skip


def prepare_chat(
    body: ChatRequest, model: ServedModel, context: RequestContext, prefix: str = "chatcmpl-"
) -> PreparedRequest:
    """Check and tokenize a chat. Raises InvalidRequest."""
    shared = shared_fields(body, model, context)
    is_cut, reasoning, form = body.truncate_prompt_tokens is not None, None, None
    whole = prompt = encode_chat(body, model, shared.tools, may_exceed_context=is_cut)
    if is_cut:
        prompt = truncated(whole, body, model)
    if model.reasoning_marks is not None:
        reasoning = _reasoning(body, model, model.reasoning_marks, whole)
        form = partial(_with_thought, shared.grammar, reasoning, body, model, prompt)
    return prepare_generation(prefix, body, model, context, [prompt], shared, reasoning=reasoning, form=form)


def check_bulk_chat(body: ChatRequest) -> None:
    """Raise InvalidRequest if a bulk run cannot answer this item with one text."""
    check_bulk_answer(body)
    if body.tools and body.tool_choice != "none":
        raise InvalidRequest("bulk runs do not support tools; send this item to a service", param="tools")


def _with_thought(
    grammar: Grammar | None,
    reasoning: Reasoning,
    body: ChatRequest,
    model: ServedModel,
    prompt: tuple[int, ...],
    max_tokens: int,
) -> Grammar | None:
    """Return the grammar extended by the reasoning before the constrained output, with its token limit."""
    budget = _budget(body, max_tokens)
    if (grammar is None and budget is None) or _is_over(reasoning, body, model, prompt):
        return grammar
    thought = Thought(reasoning.marks.begin, reasoning.marks.end, reasoning.is_open, budget)
    return replace(grammar or Grammar(GrammarKind.TEXT, "", param=body.budget_param), thought=thought)


def _budget(body: ChatRequest, max_tokens: int) -> int | None:
    """Return the limit of reasoning tokens, or None for no limit. A budget in the body overrides the effort."""
    if body.thinking_token_budget is not None or body.reasoning_effort is None:
        return body.thinking_token_budget
    return int(max_tokens * _EFFORTS[body.reasoning_effort])


def _reasoning(body: ChatRequest, model: ServedModel, marks: ReasoningMarks, prompt: tuple[int, ...]) -> Reasoning:
    """Return how to find reasoning in the output. The template or a continued message may have started it."""
    if body.continue_final_message:
        return Reasoning(marks=marks, is_open=marks.are_open(body.messages[-1].content or ""))
    return Reasoning(marks=marks, is_open=_ends_with(prompt, model, marks.begin))


def _is_over(reasoning: Reasoning, body: ChatRequest, model: ServedModel, prompt: tuple[int, ...]) -> bool:
    """Return whether no reasoning follows: the template ends with empty reasoning, or a final message is continued."""
    return not reasoning.is_open and (body.continue_final_message or _ends_with(prompt, model, reasoning.marks.end))


def _ends_with(prompt: tuple[int, ...], model: ServedModel, mark: str) -> bool:
    max_mark_tokens = 16  # enough for a mark and the line break after it
    return model.tokenizer.decode(prompt[-max_mark_tokens:], skip_special_tokens=False).rstrip().endswith(mark)


CHATS = Endpoint(
    CHATS_PATH,
    ChatRequest,
    prepare_chat,
    lambda _: ChoiceWriter(ChatFormat()),
    summary="Generate the next message",
    response=ChatCompletion,
    check_bulk=check_bulk_chat,
)
