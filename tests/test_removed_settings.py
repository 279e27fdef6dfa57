"""Settings of former versions are refused by name, all of them at once, or dropped with a warning."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from pydantic import ValidationError

from app.config import ApplicationConfig, EngineConfig, KeyConfig, SchedulerConfig, leaves, removed
from app.errors import InvalidSetup
from deployments.serve.settings import parse


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "old": "write new",
        "models[].engine.cache.old": "leave it out",
        "models[].engine.scheduler.old": "write policy",
        "models[].engine.model.backend=old": "write auto",
        "api.old[].name": "write names",
    }
    monkeypatch.setattr(removed, "REMOVED", rows)
    ignored = {"models[].engine.scheduler.idle": "it is 7", "batches.idle": "it is 8", "pipelines[].steps[].idle": "so"}
    monkeypatch.setattr(removed, "IGNORED", ignored)


@pytest.mark.usefixtures("table")
def test_all_removed_settings_are_named_at_once_with_what_to_write_instead() -> None:
    engine = {"model": {"backend": "old"}, "cache": {"old": 1, "block_size": 0}, "scheduler": {"old": 1}}
    args = {
        "old": {},
        "models": [
            {"name": "a"},
            {"engine": engine, "replicas": {"groups": [{"name": "x"}, {"scheduler": {"old": 2}}]}},
        ],
        "api": {"old": [{"name": "b"}, {}]},
    }
    with pytest.raises(InvalidSetup) as refusal:
        parse(args)
    assert str(refusal.value).splitlines() == [
        "old: this setting was removed; write new",
        "models[1].engine.cache.old: this setting was removed; leave it out",
        "models[1].engine.scheduler.old: this setting was removed; write policy",
        "models[1].replicas.groups[1].scheduler.old: this setting was removed; write policy",
        "models[1].engine.model.backend: 'old' was removed; write auto",
        "api.old[0].name: this setting was removed; write names",
    ]


@pytest.mark.usefixtures("table")
def test_a_branch_alone_is_checked_too() -> None:
    with pytest.raises(ValidationError, match=r"cache\.old: this setting was removed; leave it out"):
        EngineConfig.model_validate({"cache": {"old": 1}})
    with pytest.raises(ValidationError, match="old: this setting was removed; write policy"):
        SchedulerConfig.model_validate({"old": 1})
    with pytest.raises(ValidationError, match="old: this setting was removed; write policy"):
        SchedulerConfig().changed({"old": 1})


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    "args", [{"models": None}, {"models": {"engine": 1}}, {"models": ["a"]}, 7, {"api": {"old": 1}}]
)
def test_what_has_another_shape_is_left_to_the_other_checks(args: object) -> None:
    with pytest.raises(ValidationError) as refusal:
        ApplicationConfig.model_validate(args)
    assert "was removed" not in str(refusal.value)


def test_a_config_that_contains_itself_is_refused() -> None:
    endless: dict[str, object] = {}
    endless["models"] = [endless]
    with pytest.raises(ValidationError):
        ApplicationConfig.model_validate(endless)


@pytest.mark.usefixtures("table")
def test_an_ignored_setting_is_dropped_with_a_warning_that_says_what_is_now(caplog: pytest.LogCaptureFixture) -> None:
    args: dict[str, Any] = {
        "models": [{"engine": {"scheduler": {"idle": 1}}, "replicas": {"groups": [{"scheduler": {"idle": 2}}]}}],
        "batches": {"idle": 3},
        "pipelines": [{"name": "p", "steps": [{"kind": "generate", "model": "demo", "idle": 4}]}],
    }
    given = copy.deepcopy(args)
    config = ApplicationConfig.model_validate(args)
    assert args == given, "the caller's values stay"
    assert config.models[0].replicas.groups[0].scheduler == {}
    assert [record.message for record in caplog.records] == [
        f"{place}: this setting was removed, and its value has no effect: {now}"
        for place, now in (
            ("models[0].engine.scheduler.idle", "it is 7"),
            ("models[0].replicas.groups[0].scheduler.idle", "it is 7"),
            ("batches.idle", "it is 8"),
            ("pipelines[0].steps[0].idle", "so"),
        )
    ]


@pytest.mark.usefixtures("table")
def test_a_removed_setting_that_is_null_asks_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    given = {"cache": {"old": None}, "scheduler": {"old": None, "idle": None}}
    assert EngineConfig.model_validate(given) == EngineConfig()
    assert not caplog.records


def test_no_removed_setting_exists() -> None:
    settings = {path for path, _ in leaves(ApplicationConfig)}
    assert not settings & (removed.REMOVED | removed.IGNORED).keys()


def test_the_settings_are_at_most_110() -> None:
    """An operator should be able to read them all. A new setting needs a reason why it cannot be derived."""
    assert len([*leaves(ApplicationConfig), *KeyConfig.model_fields]) <= 110
