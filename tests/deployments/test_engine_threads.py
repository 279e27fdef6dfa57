from __future__ import annotations

from typing import Any

import pytest

from app.config import ApplicationConfig, EngineConfig, ModelConfig
from app.errors import InvalidSetup
from deployments import threads
from deployments.serve.settings import asked_threads
from deployments.threads import excess, with_threads


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "num_cores", lambda: 8)


def asked(*models: dict[str, Any]) -> list[int | None]:
    named = [{"name": f"m{number}", **model} for number, model in enumerate(models)]
    return asked_threads(ApplicationConfig.model_validate({"models": named}))


def num_threads(asked: list[int | None], *, own: int | None = None) -> int | None:
    return with_threads(EngineConfig(model=ModelConfig(num_threads=own)), asked).model.num_threads


@pytest.mark.parametrize(("num_replicas", "share"), [(1, 8), (2, 4), (3, 2), (8, 1), (20, 1)])
def test_replicas_share_the_cores(num_replicas: int, share: int) -> None:
    assert num_threads(asked({"replicas": {"num_replicas": num_replicas}})) == share


def test_all_engines_that_there_can_be_are_counted() -> None:
    growing = {"replicas": {"autoscaling": {"max_replicas": 3}}}
    simulated = {"engine": {"model": {"simulated": {}}}, "replicas": {"num_replicas": 9}}
    everything = asked(growing, {"replicas": {"num_replicas": 1}}, simulated)
    assert everything == [None] * 4
    assert num_threads(everything) == 2


def test_on_several_machines_they_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_num_machines", lambda: 2)
    assert num_threads([None] * 3) == 4
    assert excess([8, 8], 2) is None


def test_ranks_share_the_cores_as_engines_do_and_each_needs_one() -> None:
    of_four = asked({"replicas": {"num_replicas": 1, "tensor_parallel": 4}})
    assert with_threads(EngineConfig(), of_four, num_ranks=4).model.num_threads == 2
    with pytest.raises(InvalidSetup, match="tensor_parallel: got 9, but a replica may use 8 CPU cores here"):
        with_threads(EngineConfig(), [None] * 9, num_ranks=9)


def test_a_number_that_is_set_is_kept_and_too_many_are_told(caplog: pytest.LogCaptureFixture) -> None:
    assert num_threads([4, 4], own=4) == 4
    assert not caplog.records
    assert num_threads([6, 6, None], own=6) == 6
    assert "3 engines with 14 threads on 8 cores" in caplog.text
