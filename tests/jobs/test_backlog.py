from __future__ import annotations

import random
from dataclasses import replace

from app.jobs.backlog import MAX_DEATHS, Backlog
from app.jobs.results import ItemSet
from deployments.bulk.engine_worker import PreparedItem
from tests.kit.engine import make_request


def rows(*numbers: int) -> list[PreparedItem]:
    return [
        PreparedItem(number=number, id=f"row-{number}", requests=(make_request(),), stop=(), skip_special_tokens=True)
        for number in numbers
    ]


def taken(backlog: Backlog, engine: int, room: int, *, input_is_over: bool = True) -> list[int]:
    has_rows = backlog.has_items_for(engine, input_is_over=input_is_over)
    rows = backlog.take(engine, room=room, input_is_over=input_is_over)
    assert bool(rows) == (has_rows and room > 0)
    return [row.number for row in rows]


def test_rows_are_taken_in_order_up_to_the_room_there_is() -> None:
    backlog = Backlog(ItemSet(10))
    backlog.add(rows(0, 1, 2))
    assert taken(backlog, 0, 2) == [0, 1]
    assert taken(backlog, 1, 2) == [2]
    assert not backlog.is_empty
    backlog.settle(0, [0, 1])
    backlog.settle(1, [2])
    assert backlog.is_empty


def test_a_row_that_is_settled_waiting_or_on_an_engine_is_not_added_again() -> None:
    settled = ItemSet(10)
    settled.add(0)
    backlog = Backlog(settled)
    backlog.add(rows(0, 1, 2))
    assert taken(backlog, 0, 1) == [1]
    backlog.add(rows(0, 1, 2))
    assert taken(backlog, 0, 9) == [2]


def test_the_rows_of_a_dead_engine_go_first_to_another_and_only_those_begun_count_as_recomputed() -> None:
    backlog = Backlog(ItemSet(10))
    backlog.add(rows(0, 1, 2, 3))
    assert taken(backlog, 0, 3) == [0, 1, 2]
    backlog.begin(0, [0, 1])
    backlog.settle(0, [0])
    loss = backlog.lose(0)
    assert (loss.given_up, loss.begun) == ((), (1,))
    assert taken(backlog, 1, 9) == [1, 2, 3]


def test_a_row_that_is_given_back_goes_last_and_is_not_to_blame() -> None:
    backlog: Backlog[PreparedItem] = Backlog(ItemSet(10))
    backlog.add(rows(0, 1, 2))
    for first in range(MAX_DEATHS + 1):
        two = [first * 2 % 3, (first * 2 + 1) % 3]
        assert taken(backlog, 0, 2) == two
        backlog.begin(0, two[:1])
        assert [backlog.give_back(0, row) for row in two] == [True, False]
    assert sorted(taken(backlog, 0, 9)) == [0, 1, 2]
    assert backlog.lose(0).given_up == ()
    assert sorted(taken(backlog, 0, 9)) == [0, 1, 2]


def test_rows_with_which_a_process_died_run_alone_or_are_given_up_and_may_be_given_back() -> None:
    backlog: Backlog[PreparedItem] = Backlog(ItemSet(10), {1: 2, 2: MAX_DEATHS})
    assert [each.number for each in backlog.add(rows(0, 1, 2))] == [2]
    assert taken(backlog, 0, 9) == [0]
    backlog.settle(0, [0])
    for _ in range(2):
        assert taken(backlog, 0, 9) == [1]
        assert backlog.is_alone(0)
        backlog.give_back(0, 1)
    assert taken(backlog, 0, 9) == [1]


def test_a_row_that_lost_two_engines_runs_alone_after_all_others() -> None:
    backlog = Backlog(ItemSet(10))
    backlog.add(rows(0, 1))
    for _ in range(2):
        assert taken(backlog, 0, 9) == [0, 1]
        backlog.lose(0)
    backlog.add(rows(2))
    assert taken(backlog, 0, 9, input_is_over=False) == [2]
    assert taken(backlog, 1, 9, input_is_over=False) == []
    backlog.settle(0, [2])
    assert taken(backlog, 0, 9) == [0]
    assert taken(backlog, 0, 9) == []
    assert taken(backlog, 1, 9) == [1]
    backlog.settle(0, [0])
    assert taken(backlog, 0, 9) == []


def test_a_row_that_kills_engines_is_given_up_and_its_neighbours_are_not() -> None:
    poison, settled, num_deaths = 5, ItemSet(20), 0
    backlog = Backlog(settled)
    backlog.add(rows(*range(20)))
    given_up = []
    for _ in range(200):
        for engine in (0, 1):
            taken(backlog, engine, 8 - len(backlog.items_on(engine)))
            on_engine = list(backlog.items_on(engine))
            if poison in on_engine:
                given_up += backlog.lose(engine).given_up
                num_deaths += 1
            else:
                settled.update(on_engine)
                backlog.settle(engine, on_engine)
    assert [invalid.number for invalid in given_up] == [poison]
    assert num_deaths == MAX_DEATHS
    assert "died 4 times" in str(given_up[0].reason)
    assert len(settled) == 19
    assert backlog.is_empty


def test_whatever_dies_every_row_comes_out_once() -> None:
    chance, settled = random.Random(7), ItemSet(300)
    backlog, out = Backlog(settled), list[int]()
    backlog.add(rows(*range(300)))
    while not backlog.is_empty:
        engine = chance.randrange(3)
        taken(backlog, engine, 8 - len(backlog.items_on(engine)))
        on_engine = list(backlog.items_on(engine))
        if chance.random() < 0.1:
            done = [invalid.number for invalid in backlog.lose(engine).given_up]
        else:
            done = chance.sample(on_engine, k=min(4, len(on_engine)))
            backlog.settle(engine, done)
        settled.update(done)
        out += done
        for number in list(backlog.items_on(engine))[:1]:
            backlog.give_back(engine, number)
        assert backlog.num_waiting == sum(item.num_requests for item in backlog._waiting)
    assert sorted(out) == list(range(300))


def test_an_engine_has_room_for_requests_not_for_items() -> None:
    backlog = Backlog(ItemSet(10))
    backlog.add(replace(row, requests=row.requests * 3) for row in rows(0, 1, 2))
    assert backlog.num_waiting == 9
    assert taken(backlog, 0, 4) == [0, 1], "the last one may be larger than the room"
    assert (backlog.num_requests_on(0), backlog.num_waiting) == (6, 3)
