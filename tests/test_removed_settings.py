"""Settings of former versions are refused by name, all of them at once."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from app.config import ApplicationConfig, EngineConfig, SchedulerConfig, removed
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


@pytest.mark.usefixtures("table")
def test_all_removed_settings_are_named_at_once_with_what_to_write_instead() -> None:
    engine = {"model": {"backend": "old"}, "cache": {"old": 1, "block_size": 0}, "scheduler": {"old": None}}
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
        "old: this setting is gone; write new",
        "models[1].engine.cache.old: this setting is gone; leave it out",
        "models[1].engine.scheduler.old: this setting is gone; write policy",
        "models[1].replicas.groups[1].scheduler.old: this setting is gone; write policy",
        "models[1].engine.model.backend: 'old' is gone; write auto",
        "api.old[0].name: this setting is gone; write names",
    ]


@pytest.mark.usefixtures("table")
def test_a_branch_alone_is_checked_too() -> None:
    with pytest.raises(ValidationError, match=r"cache\.old: this setting is gone; leave it out"):
        EngineConfig.model_validate({"cache": {"old": 1}})
    with pytest.raises(ValidationError, match="old: this setting is gone; write policy"):
        SchedulerConfig.model_validate({"old": 1})
    with pytest.raises(ValidationError, match="old: this setting is gone; write policy"):
        SchedulerConfig().changed({"old": 1})


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    "args", [{"models": None}, {"models": {"engine": 1}}, {"models": ["a"]}, 7, {"api": {"old": 1}}]
)
def test_what_has_another_shape_is_left_to_the_other_checks(args: object) -> None:
    with pytest.raises(ValidationError) as refusal:
        ApplicationConfig.model_validate(args)
    assert "is gone" not in str(refusal.value)


def test_a_config_that_contains_itself_is_refused() -> None:
    endless: dict[str, object] = {}
    endless["models"] = [endless]
    with pytest.raises(ValidationError):
        ApplicationConfig.model_validate(endless)
