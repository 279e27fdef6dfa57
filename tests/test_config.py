"""Settings that stand for others."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from app.config import (
    PRESETS,
    ApplicationConfig,
    EngineConfig,
    GroupConfig,
    ReplicasConfig,
    SchedulerConfig,
    ServedModelConfig,
)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_what_the_config_does_not(name: str) -> None:
    plain, preset = SchedulerConfig().model_dump(), SchedulerConfig.model_validate({"preset": name})
    assert preset.model_dump() == {**plain, **PRESETS[name], "preset": name}
    assert SchedulerConfig.model_validate({"preset": name, "max_running": 7}).model_dump() == {
        **plain, **PRESETS[name], "preset": name, "max_running": 7,
    }  # fmt: skip


def test_every_preset_fits_a_model_that_is_deployed_with_the_defaults() -> None:
    groups = tuple(GroupConfig(name=name, scheduler={"preset": name}) for name in PRESETS)
    model = ServedModelConfig(replicas=ReplicasConfig(num_replicas=len(groups), groups=groups))
    assert [model.scheduler_of(name).preset for name in PRESETS] == list(PRESETS)


def test_the_preset_of_a_group_replaces_that_of_the_model_and_what_was_set_stays() -> None:
    group = GroupConfig(name="other", scheduler={"preset": "latency", "max_waiting": 5})
    model = ServedModelConfig(
        engine=EngineConfig.model_validate({"scheduler": {"preset": "throughput", "policy": "fair", "max_waiting": 9}}),
        replicas=ReplicasConfig(num_replicas=2, groups=(group,)),
    )
    found = pickle.loads(pickle.dumps(model)).scheduler_of("other")
    assert found.model_dump() == SchedulerConfig.model_validate(
        {"preset": "latency", "policy": "fair", "max_waiting": 5}
    ).model_dump()  # fmt: skip


def test_the_version_names_the_preset_and_hashes_the_values() -> None:
    names = {name: SchedulerConfig.model_validate({"preset": name}).version for name in PRESETS}
    assert {name: version.partition("-")[0] for name, version in names.items()} == {name: name for name in PRESETS}
    assert len({version.rpartition("-")[2] for version in names.values()}) == len(PRESETS)
    same = SchedulerConfig.model_validate(PRESETS["latency"]).version
    assert same == names["latency"].replace("latency", "mixed"), "the values are the same"


def test_an_unknown_preset_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValidationError, match="'latency', 'throughput', 'mixed' or 'batch'"):
        SchedulerConfig.model_validate({"preset": "fast"})


def test_a_model_with_adapters_has_a_number_of_them_in_memory() -> None:
    def number(**fields: object) -> int | None:
        served = ServedModelConfig.model_validate({"name": "m"} | fields)
        return served.engine_with_adapters.model.max_loaded_adapters

    own = {"engine": {"model": {"max_loaded_adapters": 3}}}
    assert number() is None
    assert number(adapters={"a": "/a"}) == 8
    assert number(adapters={"a": "/a"}, **own) == number(**own) == 3


@pytest.mark.parametrize(
    ("given", "max_step_tokens"),
    [
        ({"preset": "latency", "max_running": 200}, 200),
        ({"max_running": 600}, 600),
        ({"preset": "batch", "max_running": 200}, 1024),
        ({"preset": "latency"}, 128),
    ],
)
def test_a_step_that_no_one_limited_has_a_token_for_every_running_request(
    given: dict[str, object], max_step_tokens: int
) -> None:
    config = SchedulerConfig.model_validate(given)
    assert config.max_step_tokens == max_step_tokens
    assert (
        config.changed({"max_running": 8}).max_step_tokens
        == SchedulerConfig.model_validate(given | {"max_running": 8}).max_step_tokens
    ), "it is not kept as a setting of its own"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_step_tokens": 64, "max_running": 65}, "max_step_tokens=64 is below max_running=65, but"),
        ({"max_step_tokens": 8}, "max_step_tokens=8 is below max_running=32, which the preset mixed sets, but"),
        (
            {"preset": "batch", "max_step_tokens": 100},
            "max_step_tokens=100 is below max_running=128, which the preset",
        ),
    ],
)
def test_a_limit_that_the_preset_has_set_is_called_that(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        SchedulerConfig.model_validate(given)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    ("replicas", "max_running", "number"),
    [
        ({"num_replicas": 1}, 8, 32),
        ({"num_replicas": 8}, 32, 128),
        ({"num_replicas": 1, "autoscaling": {"min_replicas": 1, "max_replicas": 8}}, 32, 128),
        ({"num_replicas": 1, "autoscaling": {"min_replicas": 1, "max_replicas": 8, "mode": "advise"}}, 32, 32),
        ({"num_replicas": 64}, 256, 1024),
    ],
)
def test_batches_leave_half_of_the_slots(replicas: dict[str, Any], max_running: int, number: int) -> None:
    model = {"replicas": replicas, "engine": {"scheduler": {"max_running": max_running}}}
    config = ApplicationConfig.model_validate({"models": [model], "batches": {}})
    assert config.max_items_in_flight == number
