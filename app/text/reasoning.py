"""The reasoning that a model writes before its answer, between two marks: taken out of the text while it comes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

from app.text.begun import num_begun
from app.text.tokenizer import Tokenizer
from app.text.tool_calls.parser import MAX_HELD_BLANKS


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """What stands before and behind the reasoning."""

    begin: str
    end: str
    special_texts: tuple[str, ...]  # what may be special tokens in the vocabulary

    def are_open(self, text: str) -> bool:
        """Whether a text ends within reasoning."""
        return text.rfind(self.begin) > text.rfind(self.end)


MARKS = (
    # Qwen 3 and 3.5, DeepSeek R1 and those trained from them, SmolLM 3, LFM2.5, Nemotron.
    ReasoningMarks("<think>", "</think>", ("<think>", "</think>")),
    # Mistral's Magistral and Ministral 3.
    ReasoningMarks("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    # Gemma 4.
    ReasoningMarks("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
)


def marks_of(tokenizer: Tokenizer) -> ReasoningMarks | None:
    """Those that the model's chat template knows; None for a model that marks no reasoning."""
    return next((marks for marks in MARKS if tokenizer.has_in_template(marks.end)), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """The reasoning of one output: its marks, and whether the prompt has begun it."""

    marks: ReasoningMarks
    is_open: bool


class ReasoningPhase(Enum):
    """Where a text is."""

    BEFORE = auto()  # nothing but white space and the beginning of the mark so far
    INSIDE = auto()
    BEHIND = auto()  # behind the mark that ends it, and no text of the answer yet
    ANSWER = auto()


class SplitText(NamedTuple):
    """What a piece of text has brought."""

    reasoning: str
    text: str


class ReasoningSplitter:
    """Takes the reasoning out of one text. White space beside the marks belongs to them.

    The result does not depend on how the text was cut into pieces. Only the beginning of a text can be reasoning: marks
    in an answer are text.
    """

    def __init__(self, reasoning: Reasoning) -> None:
        self._marks = reasoning.marks
        self.phase = ReasoningPhase.INSIDE if reasoning.is_open else ReasoningPhase.BEFORE
        self.has_begun = reasoning.is_open
        self._held = ""  # may be the beginning of a mark; before the first one with white space before it
        self._blanks: list[str] = []  # white space that is held until reasoning follows
        self._has_said = False

    def push(self, text: str) -> SplitText:
        """Take the next text."""
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
        """What was held back: nothing more will come."""
        held, self._held = self._held, ""
        if self.phase is ReasoningPhase.INSIDE:
            return SplitText(self._said(held), "")
        return SplitText("", held)

    def _before(self, text: str) -> str:
        """What follows the mark that begins reasoning, or all that is text; "" while it may still be either."""
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
        """More of the reasoning, and what follows the mark that ends it."""
        text, self._held = self._held + text, ""
        reasoning, end, rest = text.partition(self._marks.end)
        if end:
            self.phase = ReasoningPhase.BEHIND
            return self._said(reasoning), rest
        num_held = num_begun(text, self._marks.end)
        said, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return self._said(said), ""

    def _said(self, text: str) -> str:
        """This reasoning with the white space before it, but for that at the very beginning, and at its end for now."""
        kept = text.strip() if not self._has_said else text.rstrip()
        if not kept:
            self._blanks.append(text)
            return ""
        before = "".join(self._blanks) if self._has_said else ""
        self._has_said, self._blanks = True, [text[len(text.rstrip()) :]]
        return before + kept
