"""Separates the reasoning that a model writes before its answer, between two marks, while the text arrives."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from app.text.begun import num_begun
from app.text.tokenizer import Tokenizer
from app.text.tool_calls.parser import MAX_HELD_BLANKS


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks before and after the reasoning."""

    begin: str
    end: str
    special_texts: tuple[str, ...]  # texts that may be special tokens in the vocabulary

    def are_open(self, text: str) -> bool:
        """Return whether a text ends within reasoning."""
        return text.rfind(self.begin) > text.rfind(self.end)


MARKS = (
    # Qwen 3 and 3.5, DeepSeek R1 and models trained from these, SmolLM 3, LFM2.5, Nemotron.
    ReasoningMarks("<think>", "</think>", ("<think>", "</think>")),
    # Mistral's Magistral and Ministral 3.
    ReasoningMarks("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    # Gemma 4.
    ReasoningMarks("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
)


def marks_of(tokenizer: Tokenizer) -> ReasoningMarks | None:
    """Return the marks in the model's chat template; None for a model that does not mark reasoning."""
    return next((marks for marks in MARKS if tokenizer.has_in_template(marks.end)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The marks of one output's reasoning, and whether the prompt ends within reasoning (`is_open`)."""

    marks: ReasoningMarks
    is_open: bool


class ReasoningPhase(Enum):
    """The position of the text so far."""

    BEFORE = auto()  # only white space, and perhaps the start of the first mark
    INSIDE = auto()
    BEHIND = auto()  # after the mark that ends the reasoning, without text of the answer
    ANSWER = auto()


class SplitText(NamedTuple):
    """The reasoning and the answer's text in a piece of text."""

    reasoning: str
    text: str


class ReasoningSplitter:
    """Separates the reasoning from one text. White space beside a mark belongs to the mark.

    The result does not depend on how the text was cut into pieces. Only the start of a text can be reasoning; marks in
    an answer are plain text.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self._marks = reasoning.marks
        self.phase = ReasoningPhase.INSIDE if reasoning.is_open else ReasoningPhase.BEFORE
        self.has_begun = reasoning.is_open
        self._held = ""  # may be the start of a mark; includes white space before the first mark
        self._blanks: list[str] = []  # white space that is held back until more reasoning follows
        self._has_said = False

    def push(self, text: str) -> SplitText:
        """Take the next piece of text."""
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
        """Return the text that was held back. Call this method after the last piece."""
        held, self._held = self._held, ""
        if self.phase is ReasoningPhase.INSIDE:
            return SplitText(self._said(held), "")
        return SplitText("", held)

    def _before(self, text: str) -> str:
        """Return the text after the first mark, or all of the text without a mark; "" while that is undecided."""
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
        """Return more of the reasoning, and the text after the mark that ends the reasoning."""
        text, self._held = self._held + text, ""
        reasoning, end, rest = text.partition(self._marks.end)
        if end:
            self.phase = ReasoningPhase.BEHIND
            return self._said(reasoning), rest
        num_held = num_begun(text, self._marks.end)
        said, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return self._said(said), ""

    def _said(self, text: str) -> str:
        """Return reasoning with the white space before it, except at the start; white space at the end is held back."""
        kept = text.strip() if not self._has_said else text.rstrip()
        if not kept:
            self._blanks.append(text)
            return ""
        before = "".join(self._blanks) if self._has_said else ""
        self._has_said, self._blanks = True, [text[len(text.rstrip()) :]]
        return before + kept
