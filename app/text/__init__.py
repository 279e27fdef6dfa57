"""Tokenizers, chat templates, incremental decoding and stop strings. Does not import torch."""

from app.text.detokenizer import Detokenizer, TokenOffsets
from app.text.generated_text import GeneratedText, TextDelta
from app.text.reasoning import Reasoning, ReasoningMarks, marks_of
from app.text.stop_strings import StopStrings
from app.text.tokenizer import Tokenizer

__all__ = [
    "Detokenizer",
    "GeneratedText",
    "Reasoning",
    "ReasoningMarks",
    "StopStrings",
    "TextDelta",
    "TokenOffsets",
    "Tokenizer",
    "marks_of",
]
