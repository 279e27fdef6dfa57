"""Continuous and hybrid batching."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.engine import CountingRunner, build_fake_engine, make_request, run_to_end

pytestmark = pytest.mark.usefixtures("small_lengths")


def prompt(length: int, first: int = 2) -> tuple[int, ...]:
    return tuple(2 + (first + 3 * i) % 47 for i in range(length))


def chunks(runner: CountingRunner) -> list[dict[str, int]]:
    """Tokens of each request in each step."""
    return [{item.request_id: len(item.token_ids) for item in batch.scheduled} for batch in runner.batches]


def test_continuous_is_no_time_window() -> None:
    """An arriving request joins at the next step, beside the running ones, without any wait."""
    runner = CountingRunner()
    engine = build_fake_engine(runner=runner)
    for n in range(4):
        engine.add(make_request(prompt(3, first=n), request_id=str(n), max_tokens=10))
        assert engine.idle_s == 0
        engine.step()
    assert [len(step) for step in chunks(runner)] == [1, 2, 3, 4]


def hybrid(share: float) -> Any:
    return {"name": "hybrid", "prefill_share": share}


def test_hybrid_gives_prefill_its_share_of_a_step_while_anything_decodes() -> None:
    runner = CountingRunner()
    engine = build_fake_engine(runner=runner, strategy=hybrid(0.25), max_step_tokens=32, prefill_chunk_tokens=32)
    engine.add(make_request(prompt(2), request_id="decodes", max_tokens=8))
    engine.step()
    for name in ("a", "b"):
        engine.add(make_request(prompt(20), request_id=name, max_tokens=1, cache_salt=name))
    for _ in range(5):
        engine.step()
    assert chunks(runner) == [
        {"decodes": 2},
        {"decodes": 1, "a": 8},
        {"decodes": 1, "a": 8},
        {"decodes": 1, "a": 4, "b": 4},
        {"decodes": 1, "b": 8},
        {"decodes": 1, "b": 8},
    ]


def test_hybrid_leaves_prefill_the_whole_step_when_nothing_decodes() -> None:
    runner = CountingRunner()
    engine = build_fake_engine(runner=runner, strategy=hybrid(0.25), max_step_tokens=32, prefill_chunk_tokens=32)
    run_to_end(engine, make_request(prompt(30), request_id="a", max_tokens=1))
    assert chunks(runner) == [{"a": 30}]


def test_hybrid_never_stops_prefill_altogether() -> None:
    engine = build_fake_engine(strategy=hybrid(0.001))
    requests = [make_request(prompt(6, first=n), max_tokens=30) for n in range(3)]
    outcome = run_to_end(engine, *requests)
    outcome.check(*requests)
