"""Reads tool calls in common formats from a model's output as the text arrives."""

from app.text.tool_calls.format import FORMATS, LIST, ToolFormat
from app.text.tool_calls.inputs import INPUT_KEY, InputParser
from app.text.tool_calls.own_readers import PlainReader, Texts
from app.text.tool_calls.parser import ArgumentsParser, CallParser, CallPiece, Parsed, ToolParser
from app.text.tool_calls.template import format_of

__all__ = [
    "FORMATS",
    "INPUT_KEY",
    "LIST",
    "ArgumentsParser",
    "CallParser",
    "CallPiece",
    "InputParser",
    "Parsed",
    "PlainReader",
    "Texts",
    "ToolFormat",
    "ToolParser",
    "format_of",
]
