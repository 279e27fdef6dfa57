"""Replicas that come with the load, go with it, and come back for a request; on a live cluster, with short delays."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from msgspec import structs
from ray.serve.config import AutoscalingConfig as ServeAutoscaling
from ray.serve.config import AutoscalingContext

from app.config import ServedModelConfig
from deployments.serve.autoscaling import TOKENS, advice, number_of_replicas, use_of
from tests.deployments.conftest import Deployed, steps_of
from tests.deployments.scraping import complete_scrape
from tests.deployments.strikes import replica_states
from tests.kit.engine import build_fake_engine, make_request
from tests.waiting import PATIENCE_S, eventually

# Serve says it whenever it reads the config back; deployments/serve/autoscaling.py says why the field is set.
pytestmark = pytest.mark.filterwarnings("ignore:The `metrics_interval_s` field:DeprecationWarning")


def model(**autoscaling: float | str) -> ServedModelConfig:
    return ServedModelConfig.model_validate({"replicas": {"num_replicas": 1, "autoscaling": autoscaling}})


def test_serve_is_told_the_settings_and_a_policy_that_it_can_load() -> None:
    elastic = model(min_replicas=0, max_replicas=3, target_s=2, scale_to_zero_after_s=7, downscale_delay_s=5)
    config = number_of_replicas(elastic)["autoscaling_config"]
    assert isinstance(config, ServeAutoscaling)
    assert (config.min_replicas, config.initial_replicas, config.max_replicas) == (0, 1, 3)
    assert (config.downscale_delay_s, config.downscale_to_zero_delay_s) == (5, 7)
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)
    assert policy(context(target=1, outstanding=15)) == (2, {})  # 5 tokens a second
    assert policy(context(target=1, outstanding=None)) == (1, {})  # it is there and has not told yet


def test_fewer_are_the_most_that_were_asked_for_since_there_should_be_fewer() -> None:
    config = number_of_replicas(model(min_replicas=0, max_replicas=3, target_s=2))["autoscaling_config"]
    policy = config.policy.get_policy()(**config.policy.policy_kwargs)

    def asked(*, target: int, outstanding: int) -> int:
        return int(policy(context(target=target, outstanding=outstanding))[0])

    assert [asked(target=3, outstanding=tokens) for tokens in (25, 5, 15, 5)] == [3, 1, 2, 2]
    assert [asked(target=3, outstanding=tokens) for tokens in (25, 5)] == [3, 1]
    assert asked(target=2, outstanding=5) == 1


def test_advice_moves_nothing_and_counts_what_no_replica_has() -> None:
    advised = model(mode="advise", max_replicas=5, target_s=2)
    assert number_of_replicas(advised) == {"num_replicas": 1}
    assert (advised.replicas.max_replicas, advised.replicas.may_sleep) == (1, False)
    engine = build_fake_engine()
    for _ in range(2):
        engine.add(make_request())
    stats = structs.replace(engine.stats(), speed=5.0)
    use = use_of(stats, engine.measurements())
    wanted = min(5, -(-int(use[TOKENS]) // 10))
    slots = advised.engine.scheduler.max_running
    by_tokens = advice(advised, [use], 2)
    assert by_tokens is not None
    assert by_tokens[:2] == (wanted, "tokens")
    queued = advice(model(mode="advise", max_replicas=5, target_s=3600), [use], 3 * slots)
    assert queued is not None
    assert queued[:2] == (3, "requests")
    silent = advice(advised, [], 0)
    assert silent is not None
    assert silent.number == 1
    assert advice(advised, [{TOKENS: 1.0}], 0) == silent, "a replica of another version may report others"
    assert advice(ServedModelConfig(), [use], 2) is None


def context(*, target: int, outstanding: int | None) -> AutoscalingContext:
    """What Serve tells a policy of one replica that has two requests."""
    engine = build_fake_engine()
    for _ in range(2):
        engine.add(make_request())
    stats = structs.replace(engine.stats(), speed=5.0)
    report = use_of(stats, engine.measurements()) | {TOKENS: outstanding}
    series = {name: {"replica": [Point(0.0), Point(number)]} for name, number in report.items() if number is not None}
    if outstanding is not None:
        series[TOKENS]["replica"] = [Point(0.0), Point(2 * outstanding)]  # their mean counts
    return AutoscalingContext(
        deployment_id=None,
        deployment_name="replica-demo",
        app_name="carousel",
        current_num_replicas=1,
        target_num_replicas=target,
        running_replicas=["replica"],
        total_num_requests=0,
        total_queued_requests=0,
        aggregated_metrics={},
        raw_metrics=series,
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=3,
        policy_state={},
        last_scale_up_time=None,
        last_scale_down_time=None,
        current_time=0.0,
        config=None,
    )


class Point:
    """A point of one of Serve's time series."""

    def __init__(self, value: float) -> None:
        self.value = value


def test_a_fixed_number_stays_fixed() -> None:
    assert number_of_replicas(ServedModelConfig()) == {"num_replicas": 2}


@pytest.fixture(scope="module")
def url(deployed: Deployed, demo_path: Path) -> Iterator[str]:
    elastic = {
        "name": "elastic",
        "engine": {"model": {"path": str(demo_path), **steps_of(20)}, "cache": {"num_blocks": 1024}},
        "replicas": {
            "num_replicas": 1,
            "num_cpus": 0.1,
            "drain_timeout_s": 30,
            "place_timeout_s": PATIENCE_S,  # for the first replica to come back
            "autoscaling": {
                "min_replicas": 0,
                "max_replicas": 2,
                "target_s": 0.05,
                "downscale_delay_s": 1.0,
                "scale_to_zero_after_s": 2.0,
            },
        },
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deployments.serve.autoscaling.UPSCALE_DELAY_S", 0.5)
        patch.setattr("deployments.serve.autoscaling.REPORT_INTERVAL_S", 0.5)
        patch.setattr("deployments.serve.autoscaling.LOOK_BACK_S", 1.0)
        with deployed("elastic", {"models": [elastic]}) as url:
            yield url


def states() -> dict[str, int]:
    return replica_states("elastic", "replica-elastic")


def num_replicas() -> int:
    """In whatever state."""
    return sum(states().values())


def ask(url: str, max_tokens: int) -> int:
    body = {"model": "elastic", "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).status_code


@contextmanager
def steady_load(url: str, num_clients: int) -> Iterator[list[int]]:
    """Clients that ask again whenever they have been answered; gives the statuses of their answers."""
    statuses: list[int] = []
    enough = threading.Event()

    def client() -> None:
        while not enough.is_set():
            statuses.append(ask(url, max_tokens=150))

    with ThreadPoolExecutor(num_clients) as threads:
        clients = [threads.submit(client) for _ in range(num_clients)]
        try:
            yield statuses
        finally:
            enough.set()
    for each in clients:
        each.result()


def seconds_until(condition: Callable[[], bool]) -> float:
    begin = time.monotonic()
    eventually(condition)
    return time.monotonic() - begin


def test_replicas_come_with_the_load_go_with_it_and_come_back_without_a_failed_request(
    url: str, record_property: Callable[[str, object], None]
) -> None:
    with steady_load(url, num_clients=6) as statuses:
        up_s = seconds_until(lambda: states().get("RUNNING") == 2)
        seconds_until(lambda: complete_scrape(url).text.count("carousel_slots{") == 2)  # the ingress has heard of both
        [wanted] = httpx.get(f"{url}/admin/fleet").json()["autoscaling"]
        assert (wanted["replicas"], wanted["wanted"] > 0, wanted["why"] != "") == (2, True, True)
    assert statuses
    assert set(statuses) == {200}
    down_s = seconds_until(lambda: num_replicas() == 0)
    # Requests for its state start no replica.
    assert httpx.get(f"{url}/ready").status_code == 200
    scrape = complete_scrape(url)  # no process is missing of a model that has no replicas
    assert 'carousel_replicas_wanted{model_name="elastic",reason="idle"} 0.0' in scrape.text
    assert num_replicas() == 0
    begin = time.monotonic()
    assert ask(url, max_tokens=3) == 200
    back_s = time.monotonic() - begin
    for name, seconds in (("up_s", up_s), ("down_s", down_s), ("back_s", back_s)):
        record_property(name, round(seconds, 1))
        print(f"{name}: {seconds:.1f}")
