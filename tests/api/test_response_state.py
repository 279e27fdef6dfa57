from __future__ import annotations

import time
from collections.abc import Callable

from app.api.output.answer import ChoiceOutput, GrowingText
from app.api.output.tool_calls import ToolCallDelta

PIECE = " " * 100  # as a token of white space


def test_a_long_output_costs_as_much_for_each_token_as_a_short_one() -> None:
    """A copy of the whole text at every token makes four times the tokens cost sixteen times as much, and more."""

    def add_text(num_pieces: int) -> ChoiceOutput:
        output = ChoiceOutput()
        for _ in range(num_pieces):
            output.text.add(PIECE)
        return output

    def add_arguments(num_pieces: int) -> ChoiceOutput:
        output = ChoiceOutput()
        output.add_calls([ToolCallDelta(0, "call", "look", "")])
        for _ in range(num_pieces):
            output.add_calls([ToolCallDelta(0, "", None, PIECE)])
        return output

    for add in (add_text, add_arguments):
        assert least_s(add, 16_000) < 10 * least_s(add, 4_000)
    assert str(add_text(50).text) == PIECE * 50
    assert add_arguments(50).calls[0]["function"] == {"name": "look", "arguments": PIECE * 50}


def least_s(add: Callable[[int], object], num_pieces: int) -> float:
    """CPU seconds of this thread, the least of three."""
    taken = []
    for _ in range(3):
        began_s = time.thread_time()
        add(num_pieces)
        taken.append(time.thread_time() - began_s)
    return min(taken)


def test_a_growing_text_changes_no_character() -> None:
    text = GrowingText()
    for piece in ("a\r\n", "b\n", "\r", "\ud800", "\N{GRINNING FACE}", ""):
        text.add(piece)
    assert str(text) == "a\r\nb\n\r\ud800\N{GRINNING FACE}"
