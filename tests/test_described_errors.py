"""What a log shows of an exception: enough to find its cause, and no client's text."""

from __future__ import annotations

import ast
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from app.errors import CarouselError, Failure, InvalidRequest, described, traceback_of

CANARY = "canary-4711"
ROOT = Path(__file__).resolve().parent.parent


class Body(BaseModel):
    number: int


def caught(function: Callable[[], Any]) -> Exception:
    try:
        function()
    except Exception as error:
        return error
    raise AssertionError("it raises nothing")


def raised(error: Exception) -> Exception:
    def fail() -> None:
        raise error

    return caught(fail)


@pytest.mark.parametrize(
    "function",
    [
        lambda: f"{CANARY}\ud800".encode(), lambda: int(CANARY), lambda: {}[CANARY], lambda: Body(number=CANARY),
        lambda: getattr("", CANARY), lambda: b"\xff".decode() + CANARY, lambda: [].index(CANARY),
    ],
)  # fmt: skip
def test_no_exception_shows_the_value_that_it_was_raised_for(function: Callable[[], Any]) -> None:
    error = caught(function)
    for text in (described(error), traceback_of(error)):
        assert type(error).__name__ in text
        assert CANARY not in text
        assert "\ud800" not in text
    assert " at test_described_errors.py:" in described(error) or "pydantic" in type(error).__module__


def test_what_a_request_quotes_is_not_shown() -> None:
    assert CANARY not in described(raised(InvalidRequest(f"prompt is {CANARY!r}")))


@pytest.mark.parametrize(
    "error",
    [
        Failure("the device is gone"), OSError(28, "the device is gone"), MemoryError("the device is gone"),
        RuntimeError("CUDA error: the device is gone"), sqlite3.OperationalError("the device is gone"),
    ],
)  # fmt: skip
def test_messages_of_ours_and_of_the_system_are_shown_with_their_place(error: Exception) -> None:
    text = described(raised(error))
    assert text.startswith(f"{type(error).__name__} at test_described_errors.py:")
    assert text.endswith("the device is gone")


def test_a_traceback_has_all_that_led_to_an_error_and_no_values() -> None:
    def fail() -> None:
        try:
            int(CANARY)
        except ValueError as error:
            error.add_note(CANARY)
            raise Failure("the request failed") from error

    text = traceback_of(caught(fail))
    assert text.index("raise Failure(") < text.index("the request failed") < text.index("int(CANARY)")
    assert text.count("raised after:") == 1
    assert CANARY not in text.replace("int(CANARY)", "")


def test_a_traceback_has_the_parts_of_a_group_and_ends_for_a_circle() -> None:
    first, second = raised(KeyError(CANARY)), raised(OSError("no room"))
    first.__context__, second.__context__ = second, first
    text = traceback_of(raised(ExceptionGroup("all", [first, second])))
    assert text.count("KeyError at") == text.count("no room") == 1
    assert CANARY not in text


def log_calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted([*ROOT.glob("app/**/*.py"), *ROOT.glob("deployments/**/*.py")]):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("logger."):
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}", node


def test_no_log_call_has_python_print_an_exception() -> None:
    calls = list(log_calls())
    assert len(calls) > 40
    for place, call in calls:
        assert call.func.attr != "exception", f"{place}: use traceback_of"  # type: ignore[attr-defined]
        assert not any(keyword.arg in ("exc_info", "stack_info") for keyword in call.keywords), place
        text = call.args[0].value if isinstance(call.args[0], ast.Constant) else ""
        names = {each.id for each in call.args[1:] if isinstance(each, ast.Name)}
        assert not ("%r" in str(text) and names & {"error", "failure", "exception"}), f"{place}: use described"


def test_every_own_error_survives_being_described() -> None:
    for kind in CarouselError.__subclasses__():
        assert kind.__name__ in described(raised(kind("why")))
