"""The formats in which models write tool calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.text.chat_messages import CALL_BEGIN, CALL_END
from app.text.tool_calls.own_readers import GemmaReader, OwnReader, PlainReader, PythonReader, TagReader


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """A format of calls. Each call is a JSON object with a name and arguments, unless it is read by `own`."""

    name: str
    begin: str = ""  # marker before calls; "" if the text consists only of calls
    end: str = ""  # marker after each call; models may omit it
    lead: str = ""  # characters that are allowed between `begin` and the first call
    separators: str = ""  # characters that are allowed between calls
    may_begin_bare: bool = False  # whether a text may start with a call without a marker
    may_follow_bare: bool = False  # whether a call may follow another call without a marker
    own: type[OwnReader] | None = None  # reader for calls that are not JSON objects
    arguments_key: str = "arguments"  # key of the arguments in the model's own templates
    special_texts: tuple[str, ...] = ()  # texts that may be special tokens
    id_prefix: str = "call_"
    id_length: int = 24  # number of random characters in a call's id


# Nous Research's Hermes and Alibaba's Qwen: <tool_call>{"name": …, "arguments": …}</tool_call>. The separator skips an
# extra closing brace that some models write.
HERMES = ToolFormat(
    name="hermes",
    begin=CALL_BEGIN,
    end=CALL_END,
    separators="}",
    special_texts=(CALL_BEGIN, CALL_END),
)
# Meta's Llama 3: {"name": …, "parameters": …}; {…} is the whole message, with or without the tag before it.
LLAMA3 = ToolFormat(
    name="llama3",
    begin="<|python_tag|>",
    separators=";",
    may_begin_bare=True,
    may_follow_bare=True,
    arguments_key="parameters",
    special_texts=("<|python_tag|>",),
)
# Used if structured output guarantees that the text consists only of calls.
LIST = ToolFormat(name="list", lead="[", separators=",]", may_follow_bare=True)
# Mistral: [TOOL_CALLS][{"name": …, "arguments": …}, …], and for newer models [TOOL_CALLS]f[ARGS]{…}. The templates
# require ids with 9 characters.
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
# Liquid's LFM2: <|tool_call_start|>[f(a=1), …]<|tool_call_end|>, or a list of objects if a system message requests it.
LFM2 = replace(
    LIST,
    name="lfm2",
    begin="<|tool_call_start|>",
    end="<|tool_call_end|>",
    own=PythonReader,
    special_texts=("<|tool_call_start|>", "<|tool_call_end|>"),
)
# IBM's Granite 3: <|tool_call|>[{"name": …, "arguments": …}, …]. Granite 4 uses the Hermes format.
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
