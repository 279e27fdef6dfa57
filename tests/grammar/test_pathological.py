"""Every grammar is refused or compiled within the limits, and other requests are not affected."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from app.engine.request import Grammar, GrammarKind
from app.errors import InvalidRequest, Overloaded
from app.grammar.compiling import lark_of, new_matcher, walk
from app.grammar.grammars import MAX_USES, CompileLimits, Grammars
from app.grammar.vocabulary import Vocabulary
from tests.grammar.conftest import DEMO_VOCAB_SIZE
from tests.grammar.documents import allowed_ids, request_for
from tests.grammar.hostile_grammars import Case, cases

TIMEOUT_S = 1.0


@pytest.fixture(scope="module")
def grammars(vocabulary: Vocabulary) -> Iterator[Grammars]:
    limits = CompileLimits(timeout_s=TIMEOUT_S, memory_bytes=256_000_000)
    made = Grammars(lambda: vocabulary, vocab_size=DEMO_VOCAB_SIZE, limits=limits)
    made.matcher_of(request_for(Grammar(GrammarKind.REGEX, "a"))).result(30)
    yield made
    made.close()


def test_hostile_grammars_have_names_of_their_own() -> None:
    assert len({(name, kind) for name, kind, _ in cases()}) == len(cases())


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case[1]}: {case[0]}")
def test_it_is_refused_or_compiled_within_the_limit(grammars: Grammars, case: Case) -> None:
    _, kind, text = case
    began_at = time.monotonic()
    compiled = grammars.matcher_of(request_for(Grammar(kind, text)))
    error = compiled.exception(30)
    if error is None:
        matcher = compiled.result()
        assert matcher is not None
        assert allowed_ids(matcher)
    else:
        assert isinstance(error, InvalidRequest)
        assert error.code == "invalid_grammar"
        assert len(error.message) < 600
    # Twice the limit: here and there; and the start of another process where one died.
    assert time.monotonic() - began_at < 2 * TIMEOUT_S + 3.0


class Ticking:
    """A thread that would like to run every millisecond, and counts how often it does."""

    def __init__(self) -> None:
        self.num_ticks = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Ticking:
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(0.001):
            self.num_ticks += 1


def test_other_threads_run_while_a_large_grammar_is_compiled_and_matched(vocabulary: Vocabulary) -> None:
    tokenizer = vocabulary.for_matching()
    [schema] = [text for name, _, text in cases() if name == "many required"]
    lark = lark_of(GrammarKind.JSON_SCHEMA, schema, is_lenient=False)
    with Ticking() as neighbour:
        before = neighbour.num_ticks
        walk(new_matcher(tokenizer, lark))
        assert neighbour.num_ticks - before > 10  # it takes a fifth of a second, and more on a busy machine


@pytest.mark.parametrize(
    ("limits", "name", "words"),
    [
        (CompileLimits(timeout_s=0.05), "many required", "takes longer than 0.05 s"),
        (CompileLimits(memory_bytes=64_000_000, timeout_s=20), "a long text", "too deep or too large"),
    ],
)
def test_time_and_memory_are_limited(vocabulary: Vocabulary, limits: CompileLimits, name: str, words: str) -> None:
    [(_, kind, text)] = [case for case in cases() if case[0] == name]
    grammars = Grammars(lambda: vocabulary, vocab_size=DEMO_VOCAB_SIZE, limits=limits)
    with pytest.raises(InvalidRequest, match=words):
        grammars.matcher_of(request_for(Grammar(kind, text))).result(30)
    # A busy machine may refuse a small one too within so short a time; others then, because refusals are remembered.
    small = (grammars.matcher_of(request_for(Grammar(GrammarKind.REGEX, "a" * number))) for number in range(1, 100))
    assert any(each.exception(30) is None for each in small)
    grammars.close()


def test_a_refusal_is_remembered(grammars: Grammars) -> None:
    request = request_for(Grammar(GrammarKind.REGEX, "(((((("))
    first = grammars.matcher_of(request).exception(30)
    again = grammars.matcher_of(request)
    assert again.done()
    assert str(again.exception()) == str(first)


def test_a_remembered_refusal_names_the_field_that_it_came_in_now(grammars: Grammars) -> None:
    for param in ("structured_outputs.regex", "tools"):
        refusal = grammars.matcher_of(request_for(Grammar(GrammarKind.REGEX, "[", param=param))).exception(30)
        assert isinstance(refusal, InvalidRequest)
        assert refusal.param == param
        assert str(refusal).startswith(f"{param}: this regular expression cannot be used")


def test_a_grammar_is_not_to_blame_for_a_process_that_had_died_before(grammars: Grammars) -> None:
    assert grammars._sandbox is not None
    process = grammars._sandbox._process or grammars._sandbox._start()
    process.kill()
    process.wait()
    assert grammars.matcher_of(request_for(Grammar(GrammarKind.REGEX, "after a death"))).result(30) is not None


def test_a_cancelled_request_takes_no_place_in_the_queue(vocabulary: Vocabulary) -> None:
    let_go = threading.Event()

    def read_late() -> Vocabulary:
        let_go.wait(30)
        return vocabulary

    grammars = Grammars(read_late, vocab_size=DEMO_VOCAB_SIZE, limits=CompileLimits(max_waiting=2))
    first = grammars.matcher_of(request_for(Grammar(GrammarKind.REGEX, "first")))
    for number in range(5):
        assert grammars.matcher_of(request_for(Grammar(GrammarKind.REGEX, f"{number}"))).cancel()
    let_go.set()
    assert first.result(30) is not None
    grammars.close()


def test_compiled_grammars_are_kept_up_to_a_number_and_begin_anew_after_many_uses(vocabulary: Vocabulary) -> None:
    grammars = Grammars(lambda: vocabulary, vocab_size=DEMO_VOCAB_SIZE, limits=CompileLimits(max_cached=3))

    def is_known(text: str) -> bool:
        future = grammars.matcher_of(request_for(Grammar(GrammarKind.REGEX, text)))
        was_done = future.done()
        assert future.result(30) is not None
        return was_done

    assert [is_known(text) for text in "abcd"] == [False] * 4
    assert [is_known(text) for text in "dcba"] == [True, True, True, False]
    uses = [is_known("b") for _ in range(2 * MAX_USES)]
    assert 1 <= uses.count(False) <= 2
    grammars.close()


def test_when_too_many_wait_others_are_told_to_come_back(vocabulary: Vocabulary) -> None:
    let_go = threading.Event()

    def read_late() -> Vocabulary:
        let_go.wait(30)
        return vocabulary

    grammars = Grammars(read_late, vocab_size=DEMO_VOCAB_SIZE, limits=CompileLimits(max_waiting=2))
    waiting = [grammars.matcher_of(request_for(Grammar(GrammarKind.REGEX, text))) for text in ("a", "b")]
    with pytest.raises(Overloaded, match="2 requests wait for their grammars"):
        grammars.matcher_of(request_for(Grammar(GrammarKind.REGEX, "c"))).result(1)
    let_go.set()
    assert all(future.result(30) is not None for future in waiting)
    assert grammars.matcher_of(request_for(Grammar(GrammarKind.REGEX, "c"))).result(30) is not None
    grammars.close()
