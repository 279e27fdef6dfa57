"""Splits a model's output into reasoning and answer while it is being generated.

The reasoning comes first, between two marks.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from app.text.begun import partial_match_length
from app.text.tokenizer import Tokenizer
from app.text.tool_calls.parser import MAX_HELD_BLANKS


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks before and after the reasoning."""

    begin: str
    end: str
    special_texts: tuple[str, ...]  # texts that may be special tokens

    def are_open(self, text: str) -> bool:
        """Return whether a text ends within reasoning: its last mark is an opening mark."""
        return text.rfind(self.begin) > text.rfind(self.end)


MARKS = (
    # Qwen 3 and 3.5, DeepSeek R1 and models derived from these, SmolLM 3, LFM2.5, Nemotron.
    ReasoningMarks("<think>", "</think>", ("<think>", "</think>")),
    # Mistral's Magistral and Ministral 3.
    ReasoningMarks("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    # Gemma 4.
    ReasoningMarks("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
)


def marks_of(tokenizer: Tokenizer) -> ReasoningMarks | None:
    """Return the marks in the model's chat template, or None if the model does not mark reasoning."""
    return next((marks for marks in MARKS if tokenizer.has_in_template(marks.end)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The marks of one output's reasoning, and whether the prompt ends within reasoning (`is_open`)."""

    marks: ReasoningMarks
    is_open: bool


class ReasoningPhase(Enum):
    """The current part of the output."""

    BEFORE = auto()  # only white space so far, and perhaps a prefix of the opening mark
    INSIDE = auto()
    BEHIND = auto()  # after the closing mark, but before the answer's first character
    ANSWER = auto()


class SplitText(NamedTuple):
    """A piece of text, split into reasoning and answer."""

    reasoning: str
    text: str


class ReasoningSplitter:
    """Separates the reasoning from the rest of one text. White space next to a mark is dropped with the mark.

    The result does not depend on how the text is divided into pieces. Reasoning must be at the start of the text: marks
    within an answer are plain text.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self._marks = reasoning.marks
        self.phase = ReasoningPhase.INSIDE if reasoning.is_open else ReasoningPhase.BEFORE
        self.has_begun = reasoning.is_open
        # Text that may be the start of a mark. Before the opening mark, this includes leading white space.
        self._held = ""
        self._blanks: list[str] = []  # white space that is held back until more reasoning follows
        self._has_said = False

    def push(self, text: str) -> SplitText:
        """Split the next piece of text. Characters that may belong to a mark are held back."""
        reasoning = ""
        if self.phase is ReasoningPhase.BEFORE:
            text = self._before(text)
        if self.phase is ReasoningPhase.INSIDE:
            reasoning, text = self._inside(text)
        if self.phase is ReasoningPhase.BEHIND:
            text = text.lstrip()
            if text:
                self.phase = ReasoningPhase.ANSWER
        return SplitText(reasoning, text)

    def flush(self) -> SplitText:
        """Return the text that is still held back. Call this after the last piece."""
        held, self._held = self._held, ""
        if self.phase is ReasoningPhase.INSIDE:
            return SplitText(self._said(held), "")
        return SplitText("", held)

    def _before(self, text: str) -> str:
        """Return the text after the opening mark, the whole text if there is no mark, or "" while this is undecided."""
        text, self._held = self._held + text, ""
        written = text.lstrip()
        if written.startswith(self._marks.begin) and len(text) - len(written) <= MAX_HELD_BLANKS:
            self.phase, self.has_begun = ReasoningPhase.INSIDE, True
            return written.removeprefix(self._marks.begin)
        if self._marks.begin.startswith(written) and len(text) - len(written) <= MAX_HELD_BLANKS:
            self._held, text = text, ""
        else:
            self.phase = ReasoningPhase.ANSWER
        return text

    def _inside(self, text: str) -> tuple[str, str]:
        """Return (new reasoning, text after the closing mark)."""
        text, self._held = self._held + text, ""
        reasoning, end, rest = text.partition(self._marks.end)
        if end:
            self.phase = ReasoningPhase.BEHIND
            return self._said(reasoning), rest
        num_held = partial_match_length(text, self._marks.end)
        said, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return self._said(said), ""

    def _said(self, text: str) -> str:
        """Return reasoning without leading white space. Trailing white space is held back until more text follows."""
        kept = text.strip() if not self._has_said else text.rstrip()
        if not kept:
            self._blanks.append(text)
            return ""
        before = "".join(self._blanks) if self._has_said else ""
        self._has_said, self._blanks = True, [text[len(text.rstrip()) :]]
        return before + kept
