"""A small simulated fleet: what each policy is there for."""

from __future__ import annotations

import json

import pytest

from benchmarks.service.dispatch import Figures, Trial, main, measure

TRIAL = Trial(num_replicas=8, num_ingresses=2, num_requests=500, load=0.8, seed=3, max_running=8)


@pytest.fixture(scope="module")
def figures() -> Figures:
    return measure(TRIAL)


def test_least_loaded_brings_the_first_token_earlier_where_places_are_scarce(figures: Figures) -> None:
    assert figures["equal"]["mean_ttft_ratio"] <= 0.8


def test_a_slow_replica_gets_no_more_than_its_share_of_the_speed(figures: Figures) -> None:
    slow = figures["slow"]
    assert slow["least_loaded"]["slow_share"] <= 1.2 * slow["fair_share"]
    assert slow["round_robin"]["slow_share"] == pytest.approx(1 / 8, abs=0.01)


def test_prefix_affinity_finds_more_cached_and_first_tokens_come_no_later(figures: Figures) -> None:
    conversations = figures["conversations"]
    affinity, least = conversations["prefix_affinity"], conversations["least_loaded"]
    assert affinity["hit_rate"] >= 1.5 * least["hit_rate"]
    assert affinity["ttft_mean_s"] <= least["ttft_mean_s"]


def test_one_line_of_json_the_same_for_the_same_seed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = []
    for _ in range(2):
        assert main(["--replicas", "2", "--requests", "40"]) == 0
        lines.append(capsys.readouterr().out)
    assert lines[0] == lines[1]
    assert json.loads(lines[0])["requests"] == 40
