"""How models write tool calls."""

from __future__ import annotations

from dataclasses import dataclass

from app.text.chat_messages import CALL_BEGIN, CALL_END


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way of writing calls. Each call is a JSON object with a name and arguments, or a plain name before them."""

    name: str
    begin: str = ""  # what stands before calls; "" when there is nothing else but calls
    end: str = ""  # what stands behind each call, where the model does not forget it
    lead: str = ""  # characters between `begin` and the first call
    separators: str = ""  # characters between calls
    may_begin_bare: bool = False  # the text may begin with a call that nothing marks
    may_follow_bare: bool = False  # a call may follow another without a marker
    has_plain_names: bool = False  # `f[ARGS]{…}` as well
    arguments_key: str = "arguments"  # how its own templates call them
    special_texts: tuple[str, ...] = ()  # what may be special tokens in the vocabulary
    id_prefix: str = "call_"
    id_length: int = 24  # random characters of a call's id


# Nous Research's Hermes and Alibaba's Qwen: <tool_call>{"name": …, "arguments": …}</tool_call>. Some close a brace
# too many.
HERMES = ToolFormat(
    name="hermes",
    begin=CALL_BEGIN,
    end=CALL_END,
    separators="}",
    special_texts=(CALL_BEGIN, CALL_END),
)
# Meta's Llama 3: {"name": …, "parameters": …}; {…} as the whole message, with or without its tag.
LLAMA3 = ToolFormat(
    name="llama3",
    begin="<|python_tag|>",
    separators=";",
    may_begin_bare=True,
    may_follow_bare=True,
    arguments_key="parameters",
    special_texts=("<|python_tag|>",),
)
# Mistral: [TOOL_CALLS][{"name": …, "arguments": …}, …], and newer [TOOL_CALLS]f[ARGS]{…}. Templates want short ids.
MISTRAL = ToolFormat(
    name="mistral",
    begin="[TOOL_CALLS]",
    lead="[",
    separators=",]",
    may_follow_bare=True,
    has_plain_names=True,
    special_texts=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    id_prefix="",
    id_length=9,
)
FORMATS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL)}
# How calls are written when structured output makes sure that there is nothing else.
LIST = ToolFormat(name="list", lead="[", separators=",]", may_follow_bare=True)
