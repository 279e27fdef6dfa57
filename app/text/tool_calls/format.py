"""How models write tool calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.text.chat_messages import CALL_BEGIN, CALL_END
from app.text.tool_calls.own_readers import GemmaReader, OwnReader, PlainReader, PythonReader, TagReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way of writing calls. Each call is a JSON object with a name and arguments, or is written in an own way."""

    name: str
    begin: str = ""  # what stands before calls; "" when there is nothing else but calls
    end: str = ""  # what stands behind each call, where the model does not forget it
    lead: str = ""  # characters between `begin` and the first call
    separators: str = ""  # characters between calls
    may_begin_bare: bool = False  # the text may begin with a call that nothing marks
    may_follow_bare: bool = False  # a call may follow another without a marker
    own: type[OwnReader] | None = None  # reads calls that are no objects
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
# How calls are written when structured output makes sure that there is nothing else.
LIST = ToolFormat(name="list", lead="[", separators=",]", may_follow_bare=True)
# Mistral: [TOOL_CALLS][{"name": …, "arguments": …}, …], and newer [TOOL_CALLS]f[ARGS]{…}. Templates want short ids.
MISTRAL = replace(
    LIST,
    name="mistral",
    begin="[TOOL_CALLS]",
    own=PlainReader,
    special_texts=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    id_prefix="",
    id_length=9,
)
# Alibaba's Qwen3-Coder and Qwen3.5, and NVIDIA's Nemotron 3: <tool_call><function=f><parameter=a>…</parameter>…
QWEN3_CODER = replace(HERMES, name="qwen3_coder", own=TagReader)
# Liquid's LFM2: <|tool_call_start|>[f(a=1), …]<|tool_call_end|>, or objects in the list if a system message asks so.
LFM2 = replace(
    LIST,
    name="lfm2",
    begin="<|tool_call_start|>",
    end="<|tool_call_end|>",
    own=PythonReader,
    special_texts=("<|tool_call_start|>", "<|tool_call_end|>"),
)
# IBM's Granite 3: <|tool_call|>[{"name": …, "arguments": …}, …]. Granite 4 writes as Hermes.
GRANITE = replace(
    LIST,
    name="granite",
    begin="<|tool_call|>",
    special_texts=("<|tool_call|>",),
)
# NVIDIA's Nemotron Nano 2: <TOOLCALL>[{"name": …, "arguments": …}, …]</TOOLCALL>.
NEMOTRON = replace(
    LIST,
    name="nemotron",
    begin="<TOOLCALL>",
    end="</TOOLCALL>",
    special_texts=("<TOOLCALL>", "</TOOLCALL>"),
)
# Google's Gemma 4: <|tool_call>call:f{a:1,b:<|"|>x<|"|>}<tool_call|>.
GEMMA4 = ToolFormat(
    name="gemma4",
    begin="<|tool_call>",
    end="<tool_call|>",
    own=GemmaReader,
    special_texts=("<|tool_call>", "<tool_call|>", '<|"|>'),
)
FORMATS = {form.name: form for form in (HERMES, LLAMA3, MISTRAL, QWEN3_CODER, LFM2, GRANITE, NEMOTRON, GEMMA4)}
