"""Every grammar is refused or compiled within the limits, and other requests are not affected."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from app.api.prepared_request import RequestLimits
from app.engine.matcher import Matcher
from app.engine.request import Grammar, GrammarKind
from app.errors import EngineStopped, InvalidRequest, Overloaded, Unavailable
from app.grammar import compiling
from app.grammar.compiling import new_matcher, walk
from app.grammar.grammars import CompileLimits, Grammars
from app.grammar.vocabulary import Vocabulary
from tests.grammar.documents import allowed_ids, matcher_for, request_for
from tests.grammar.hostile_grammars import Case, cases
from tests.kit.garbage import no_garbage
from tests.waiting import PATIENCE_S, eventually, stop_child

TIMEOUT_S = 0.5


@pytest.fixture(scope="module")
def grammars(vocabulary: Vocabulary) -> Iterator[Grammars]:
    limits = CompileLimits(timeout_s=TIMEOUT_S, memory_bytes=256_000_000)
    made = Grammars(lambda: vocabulary, limits=limits)
    compiled(made, "a")
    yield made
    made.close()


def test_hostile_grammars_have_names_of_their_own() -> None:
    assert len({(name, kind) for name, kind, _ in cases()}) == len(cases())


@pytest.mark.parametrize("case", cases(), ids=lambda case: f"{case[1]}: {case[0]}")
def test_it_is_refused_or_compiled_within_the_limit(grammars: Grammars, case: Case) -> None:
    _, kind, text = case
    before_s = cpu_s(grammars)
    compiled = grammars.matcher_of(request_for(Grammar(kind, text)))
    error = compiled.exception()
    if error is None:
        matcher = compiled.result()
        assert matcher is not None
        assert allowed_ids(matcher)
    else:
        assert isinstance(error, InvalidRequest)
        assert error.code == "invalid_grammar"
        assert len(error.message) < 600
    # Twice the limit: here and there; and the start of another process where one died.
    assert cpu_s(grammars) - before_s < 2 * TIMEOUT_S + 3.0


def cpu_s(grammars: Grammars) -> float:
    """Seconds of CPU that this process and its workers have had, those that have died among them."""
    user, system, user_of_dead, system_of_dead, _ = os.times()
    process = newest_process(grammars)
    fields = [] if process is None else Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    of_worker = sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")
    return user + system + user_of_dead + system_of_dead + of_worker


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
    [lark] = compiling.compiled(tokenizer, GrammarKind.JSON_SCHEMA, schema, is_lenient=False, special={}).larks
    with Ticking() as neighbour:
        before = neighbour.num_ticks
        walk(new_matcher(tokenizer, lark))
        assert neighbour.num_ticks - before > 10  # it takes a fifth of a second, and more on a busy machine


def test_a_request_that_waited_is_freed_with_its_matcher(vocabulary: Vocabulary) -> None:
    with closing(Grammars(lambda: vocabulary)) as grammars:
        grammars.matcher_of(request_for(Grammar(GrammarKind.REGEX, "first"))).result()  # starts what stays
        with no_garbage():
            for text in ("a", "b", "c"):  # the thread is done with the one before
                grammars.matcher_of(request_for(Grammar(GrammarKind.REGEX, text))).result()


def test_what_is_remembered_of_refused_grammars_is_small(vocabulary: Vocabulary) -> None:
    with closing(Grammars(lambda: vocabulary)) as grammars:
        grammars.matcher_of(request_for(Grammar(GrammarKind.REGEX, "("))).exception()  # starts what stays
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            for number in range(10):
                large = Grammar(GrammarKind.REGEX, f"({'é' * 100_000}{number}")
                first, again = (grammars.matcher_of(request_for(large)).exception() for _ in range(2))
                assert str(first) == str(again)
                assert isinstance(first, InvalidRequest)
                del first, again, large
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert after - before < 100_000  # the texts have two megabytes


@pytest.mark.parametrize(
    ("limits", "name", "words"),
    [
        (CompileLimits(timeout_s=0.05), "many required", "takes more than 0.05 s"),
        (CompileLimits(memory_bytes=64_000_000, timeout_s=20), "a long text", "too deep or too large"),
    ],
)
def test_time_and_memory_are_limited(vocabulary: Vocabulary, limits: CompileLimits, name: str, words: str) -> None:
    [(_, kind, text)] = [case for case in cases() if case[0] == name]
    grammars = Grammars(lambda: vocabulary, limits=limits)
    with pytest.raises(InvalidRequest, match=words):
        grammars.matcher_of(request_for(Grammar(kind, text))).result()
    # A busy machine may refuse a small one too within so short a time; others then, because refusals are remembered.
    small = (grammars.matcher_of(request_for(Grammar(GrammarKind.REGEX, "a" * number))) for number in range(1, 100))
    assert any(each.exception() is None for each in small)
    grammars.close()


def test_a_refusal_is_remembered(grammars: Grammars) -> None:
    first = asked(grammars, "((((((").exception()
    again = asked(grammars, "((((((")
    assert again.done()
    assert str(again.exception()) == str(first)


def test_a_remembered_refusal_names_the_field_that_it_came_in_now(grammars: Grammars) -> None:
    for param in ("structured_outputs.regex", "tools"):
        refusal = grammars.matcher_of(request_for(Grammar(GrammarKind.REGEX, "[", param=param))).exception()
        assert isinstance(refusal, InvalidRequest)
        assert refusal.param == param
        assert str(refusal).startswith(f"{param}: this regular expression cannot be used")


def test_a_grammar_is_not_to_blame_for_a_process_that_had_died_before(vocabulary: Vocabulary) -> None:
    with closing(Grammars(lambda: vocabulary)) as grammars:
        process = worker_of(grammars)
        process.kill()
        process.wait()
        compiled(grammars, "after a death")


def test_a_grammar_is_tried_again_where_its_process_was_killed(vocabulary: Vocabulary) -> None:
    with closing(Grammars(lambda: vocabulary)) as grammars:
        process = worker_of(grammars)
        stop_child(process.pid)  # so that it is killed over this grammar
        tried = asked(grammars, "once more")
        eventually(tried.running)
        time.sleep(0.05)
        process.kill()
        assert tried.result() is not None


def test_where_the_process_is_killed_each_time_the_grammar_is_not_refused_for_ever(vocabulary: Vocabulary) -> None:
    with closing(Grammars(lambda: vocabulary)) as grammars:
        process = worker_of(grammars)
        stop_child(process.pid)
        tried = asked(grammars, "killed")
        while not tried.done():
            process.kill()
            process = newest_process(grammars) or process
        error = tried.exception()
        assert isinstance(error, Unavailable)
        assert "was killed by signal 9" in str(error)
        compiled(grammars, "killed")


def test_waiting_for_the_processor_is_no_fault_of_a_grammar(vocabulary: Vocabulary) -> None:
    [schema] = [text for name, _, text in cases() if name == "many required"]  # a tenth of a second of CPU, or more
    limits = CompileLimits(timeout_s=1.0)
    with closing(Grammars(lambda: vocabulary, limits=limits)) as grammars:
        process = worker_of(grammars)
        tried = grammars.matcher_of(request_for(Grammar(GrammarKind.JSON_SCHEMA, schema)))
        time.sleep(0.05)
        stop_child(process.pid)
        time.sleep(1.2)
        process.send_signal(signal.SIGCONT)
        assert tried.result() is not None
        assert newest_process(grammars) is process


def test_one_tenants_expensive_grammars_delay_no_other_tenant(vocabulary: Vocabulary) -> None:
    names = [[f"p{each}-{number}" for number in range(2800)] for each in range(12)]
    large = [
        json.dumps({"properties": {name: {"type": "string"} for name in of_one}, "required": of_one})
        for of_one in names
    ]
    with closing(Grammars(lambda: vocabulary)) as grammars:
        worker_of(grammars)
        schemas = [request_for(Grammar(GrammarKind.JSON_SCHEMA, text), tenant="one") for text in large]
        expensive = [grammars.matcher_of(schema) for schema in schemas]
        cheap = asked(grammars, "yes|no", tenant="other")
        assert cheap.result() is not None
        assert not expensive[-1].done()  # all of them take seconds


def test_one_tenant_does_not_take_all_places(vocabulary: Vocabulary) -> None:
    with held_up(vocabulary, max_waiting=4) as (grammars, let_go):
        many = [asked(grammars, f"a{number}", tenant="one") for number in range(6)]
        few = [asked(grammars, f"b{number}", tenant="other") for number in range(2)]
        assert [isinstance(each.exception(1), Overloaded) for each in many[2:]] == [True] * 4
        let_go()
        assert all(each.result() is not None for each in [*many[:2], *few])


def test_all_choices_of_one_call_have_a_place(vocabulary: Vocabulary) -> None:
    with held_up(vocabulary) as (grammars, let_go):
        choices = [asked(grammars, "a+", tenant="one") for _ in range(RequestLimits().max_choices)]
        let_go()
        assert all(each.result() is not None for each in choices)


def test_at_the_end_those_that_wait_hear_of_it(vocabulary: Vocabulary) -> None:
    grammars = Grammars(lambda: vocabulary)
    process = worker_of(grammars)
    stop_child(process.pid)
    waiting = [asked(grammars, text) for text in ("now", "later")]
    eventually(waiting[0].running)
    time.sleep(0.05)
    grammars.close()
    assert all(isinstance(each.exception(), EngineStopped) for each in waiting)
    assert isinstance(asked(grammars, "x").exception(1), EngineStopped)


def worker_of(grammars: Grammars) -> subprocess.Popen[bytes]:
    """The process that the next grammar is compiled in, which runs."""
    compiled(grammars, "a first one")
    process = newest_process(grammars)
    assert process is not None
    return process


def newest_process(grammars: Grammars) -> subprocess.Popen[bytes] | None:
    assert grammars._tools is not None
    return next((each._process for each in grammars._tools.sandboxes if each._process is not None), None)


def is_cached(grammars: Grammars, text: str) -> bool:
    future = asked(grammars, text)
    was_done = future.done()
    assert future.result() is not None
    return was_done


def asked(grammars: Grammars, text: str, **fields: object) -> Future[Matcher | None]:
    return grammars.matcher_of(request_for(Grammar(GrammarKind.REGEX, text), **fields))


def compiled(grammars: Grammars, text: str) -> Matcher:
    return matcher_for(grammars, GrammarKind.REGEX, text)


@contextmanager
def held_up(
    vocabulary: Vocabulary, *, max_waiting: int = CompileLimits().max_waiting
) -> Iterator[tuple[Grammars, Callable[[], None]]]:
    """Grammars that wait for their vocabulary, and what lets them go."""
    let_go = threading.Event()

    def read_late() -> Vocabulary:
        let_go.wait(PATIENCE_S)
        return vocabulary

    with closing(Grammars(read_late, limits=CompileLimits(max_waiting=max_waiting))) as grammars:
        yield grammars, let_go.set


def test_a_cancelled_request_takes_no_place_in_the_queue(vocabulary: Vocabulary) -> None:
    with held_up(vocabulary, max_waiting=2) as (grammars, let_go):
        first = asked(grammars, "first")
        for number in range(5):
            assert asked(grammars, f"{number}").cancel()
        let_go()
        assert first.result() is not None


def test_compiled_grammars_are_kept_up_to_a_number(vocabulary: Vocabulary) -> None:
    grammars = Grammars(lambda: vocabulary, limits=CompileLimits(max_cached=3))

    assert [is_cached(grammars, text) for text in "abcd"] == [False] * 4
    assert [is_cached(grammars, text) for text in "dcba"] == [True, True, True, False]
    grammars.close()


def test_a_grammar_that_has_learned_much_is_compiled_anew(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Grammars(lambda: vocabulary)) as grammars:
        matcher = compiled(grammars, ".{0,1000}x")
        assert is_cached(grammars, ".{0,1000}x")
        monkeypatch.setattr("app.grammar.grammars.MAX_MATCHING_S", 0.001)
        while is_cached(grammars, ".{0,1000}x"):
            matcher.advance(allowed_ids(matcher)[0])
            matcher.prepare()


def test_of_all_cached_grammars_those_that_have_learned_most_are_forgotten(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Grammars(lambda: vocabulary)) as grammars:
        large = [f".{{0,1000}}x{number}" for number in range(3)]
        compiled(grammars, "a small one")
        monkeypatch.setattr("app.grammar.grammars.MAX_CACHED_S", 0.001)
        for text in large:
            matcher = compiled(grammars, text)
            for _ in range(300):
                matcher.advance(allowed_ids(matcher)[0])
                matcher.prepare()
        assert is_cached(grammars, "a small one")
        assert [is_cached(grammars, text) for text in large].count(True) < len(large)


def test_when_too_many_wait_others_are_told_to_come_back(vocabulary: Vocabulary) -> None:
    with held_up(vocabulary, max_waiting=2) as (grammars, let_go):
        waiting = [asked(grammars, text) for text in ("a", "b")]
        with pytest.raises(Overloaded, match="2 requests are waiting for their grammars"):
            asked(grammars, "c").result(1)
        let_go()
        assert all(future.result() is not None for future in waiting)
        assert asked(grammars, "c").result() is not None
