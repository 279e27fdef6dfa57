"""Turns and places of tenants whose grammars wait to be compiled."""

from __future__ import annotations

from app.engine.request import Grammar, GrammarKind
from app.grammar.compile_queue import CompileQueue, WaitingRequest
from tests.grammar.documents import request_for


def waiting(tenant: str) -> WaitingRequest:
    grammar = Grammar(GrammarKind.REGEX, "a")
    return WaitingRequest(request_for(grammar, tenant=tenant), grammar)


def turns(queue: CompileQueue) -> str:
    """The tenants in the order of their turns, where one grammar is compiled at a time."""
    found = ""
    while (taken := queue.take()) is not None:
        found += taken.request.tenant
        queue.end(taken)
    return found


def test_of_one_tenant_one_grammar_is_compiled_at_a_time() -> None:
    queue = CompileQueue(100)
    for tenant in "aab":
        queue.add(waiting(tenant))
    first, second = queue.take(), queue.take()
    assert first is not None
    assert second is not None
    assert [first.request.tenant, second.request.tenant] == ["a", "b"]
    assert queue.take() is None
    queue.end(first)
    assert turns(queue) == "a"


def test_a_tenant_that_took_all_places_gives_some_to_others() -> None:
    queue = CompileQueue(4)
    sent = [waiting("a") for _ in range(4)]
    assert [queue.add(each) for each in sent] == [None] * 4
    one_more = waiting("a")
    assert queue.add(one_more) is one_more
    assert queue.add(waiting("b")) is sent[3], "the newest of the tenant with the most"
    assert queue.add(waiting("b")) is sent[2]
    assert queue.add(last := waiting("b")) is last, "they have the same now"
    assert queue.add(waiting("c")) is sent[1] or queue.num_of("b") == 1
    assert len(queue) == 4


def test_a_grammar_that_is_being_compiled_takes_a_place_and_keeps_it() -> None:
    queue = CompileQueue(2)
    queue.add(waiting("a"))
    assert queue.take() is not None
    newest = waiting("a")
    queue.add(newest)
    assert queue.add(waiting("b")) is newest
    assert queue.add(other := waiting("b")) is other
    assert queue.num_of("a") == queue.num_of("b") == 1


def test_what_is_discarded_leaves_its_place() -> None:
    queue = CompileQueue(1)
    gone = waiting("a")
    queue.add(gone)
    queue.discard(gone)
    queue.discard(gone)
    assert queue.add(waiting("a")) is None
    assert turns(queue) == "a"
    assert len(queue) == 0
