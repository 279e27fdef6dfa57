"""Padded batches: when they start, which requests are in them, what they waste."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.engine.padded_batches import PaddedBatches, take_batch
from benchmarks.harness.workload import TimedRequest, Workload
from tests.fakes import make_request

BATCH_S = 2.0


class StoppedClock:
    """Time that passes only while something is waited for or generated."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def now(self) -> float:
        return self.at_s

    def wait_until(self, at_s: float) -> None:
        self.at_s = max(self.at_s, at_s)


class FakeModel:
    """Generates sevens for every row until the longest is done, in two seconds a batch."""

    def __init__(self, clock: StoppedClock) -> None:
        self.generation_config = SimpleNamespace(eos_token_id=1)
        self.device = torch.device("cpu")
        self.shapes: list[tuple[int, ...]] = []
        self._clock = clock

    def generate(self, *, input_ids: torch.Tensor, max_new_tokens: int, **options: Any) -> torch.Tensor:
        self.shapes.append(tuple(input_ids.shape))
        self._clock.at_s += BATCH_S
        return torch.cat([input_ids, torch.full((len(input_ids), max_new_tokens), 7)], dim=1)


def request(name: str, *, num_prompt: int = 3, max_tokens: int = 4, arrival_s: float = 0.0) -> TimedRequest:
    made = make_request((5,) * num_prompt, request_id=name, max_tokens=max_tokens, ignore_eos=True)
    return TimedRequest(request=made, arrival_s=arrival_s)


def padded(*, batch_size: int = 2, window_s: float = 0.5) -> tuple[PaddedBatches, FakeModel]:
    clock = StoppedClock()
    model = FakeModel(clock)
    return PaddedBatches(model, batch_size=batch_size, window_s=window_s, start_clock=lambda: clock), model


def test_static_batches_wait_until_they_are_full_and_the_last_goes_as_it_is() -> None:
    contender, model = padded()
    run = contender.serve(Workload((request("a"), request("b", arrival_s=9), request("c", arrival_s=9))))
    assert contender.joined_s == {"a": 9, "b": 9, "c": 11}
    assert run.timelines["a"].latency_s == 9 + BATCH_S
    assert model.shapes == [(2, 3), (1, 3)]


def test_dynamic_batches_go_when_the_oldest_has_waited_long_enough() -> None:
    contender, _ = padded()
    contender.grouping = "dynamic"
    contender.serve(Workload((request("a"), request("b", arrival_s=9), request("c", arrival_s=9.25))))
    assert contender.joined_s == {"a": 0.5, "b": 9.25, "c": 9.25}


def test_sorted_batches_are_of_like_length_and_always_take_the_oldest() -> None:
    waiting = [request("long", num_prompt=9), request("short", num_prompt=2), request("longer", num_prompt=10)]
    batch = take_batch(waiting, 2, by_length=True)
    assert [timed.request.request_id for timed in batch] == ["long", "longer"]
    assert [timed.request.request_id for timed in waiting] == ["short"]


def test_padding_counts_short_prompts_and_rows_that_have_ended() -> None:
    contender, _ = padded()
    contender.serve(Workload((request("a", num_prompt=8, max_tokens=1), request("b", num_prompt=2, max_tokens=5))))
    # Two rows of 8 + 5 - 1 tokens; of these 8 and 2 + 5 - 1 were asked for.
    assert contender.padding_share == pytest.approx(1 - (8 + 6) / (2 * 12))


def test_nothing_is_wasted_on_a_batch_of_one_length() -> None:
    contender, _ = padded()
    run = contender.serve(Workload((request("a"), request("b"))))
    assert contender.padding_share == 0
    assert {name: timeline.token_ids for name, timeline in run.timelines.items()} == {"a": [7] * 4, "b": [7] * 4}


def test_the_count_starts_anew_with_every_run() -> None:
    contender, _ = padded()
    contender.serve(Workload((request("a", num_prompt=8), request("b", num_prompt=2))))
    assert contender.padding_share > 0
    contender.serve(Workload((request("a"), request("b"))))
    assert contender.padding_share == 0
