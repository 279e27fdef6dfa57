"""Matchers prepared beside a computation: each once, and all of them, in either thread."""

from __future__ import annotations

import gc
import threading

import pytest

from app.model.matcher_preparer import MatcherPreparer
from tests.waiting import PATIENCE_S


class GatedMatcher:
    """Counts how often it is prepared, and in which thread; waits at a gate where it has one."""

    def __init__(self, gate: threading.Event | None = None, *, error: Exception | None = None) -> None:
        self.prepared_by: list[str] = []
        self.begun = threading.Event()
        self._gate, self._error = gate, error

    def prepare(self) -> None:
        self.begun.set()
        if self._gate is not None:
            assert self._gate.wait(PATIENCE_S), "the gate was not opened"
        self.prepared_by.append(threading.current_thread().name)
        if self._error is not None:
            raise self._error


def test_all_are_prepared_once_while_something_is_computed() -> None:
    preparer = MatcherPreparer()
    for _ in range(50):
        matchers = [GatedMatcher() for _ in range(9)]
        with preparer.preparing(matchers):
            assert matchers[0].begun.wait(PATIENCE_S)  # a computation, in which the other thread gets on
        assert [len(matcher.prepared_by) for matcher in matchers] == [1] * 9
        assert matchers[0].prepared_by == ["masks_0"]


def test_matchers_that_the_thread_has_not_begun_are_prepared_by_the_caller() -> None:
    gate = threading.Event()
    matchers = [GatedMatcher(gate), *(GatedMatcher() for _ in range(5))]
    opener = threading.Thread(target=lambda: (matchers[-1].begun.wait(PATIENCE_S), gate.set()))
    opener.start()
    with MatcherPreparer().preparing(matchers):
        assert matchers[0].begun.wait(PATIENCE_S)
    # The thread was held at the first: it opened only when the last had been done by this one.
    opener.join()
    assert matchers[0].prepared_by == ["masks_0"]
    assert all(matcher.prepared_by == [threading.current_thread().name] for matcher in matchers[1:])


def test_an_error_of_one_matcher_does_not_end_the_thread() -> None:
    preparer = MatcherPreparer()
    for _ in range(3):
        matchers = [GatedMatcher(error=ValueError("no")), GatedMatcher()]
        with preparer.preparing(matchers):
            assert matchers[1].begun.wait(PATIENCE_S)
        assert [matcher.prepared_by for matcher in matchers] == [["masks_0"]] * 2


def test_a_computation_that_fails_leaves_no_matcher_half_prepared() -> None:
    matchers = [GatedMatcher() for _ in range(3)]
    with pytest.raises(RuntimeError, match="the device"), MatcherPreparer().preparing(matchers):
        raise RuntimeError("the device failed")
    assert [len(matcher.prepared_by) for matcher in matchers] == [1] * 3


def test_without_matchers_there_is_no_thread_and_with_its_owner_it_ends() -> None:
    before = set(threading.enumerate())
    preparer = MatcherPreparer()
    with preparer.preparing([]):
        assert set(threading.enumerate()) == before
    with preparer.preparing([GatedMatcher()]):
        [thread] = set(threading.enumerate()) - before
    del preparer
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
