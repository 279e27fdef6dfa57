"""What an operator reads who has made a mistake in the Serve config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from app.errors import InvalidSetup
from deployments.settings import parse, read_serve_file

DEPLOYMENTS = Path(__file__).parents[2] / "deployments"


def message_for(**model: Any) -> str:
    with pytest.raises(InvalidSetup) as caught:
        parse({"models": [model]})
    return caught.value.message


@pytest.mark.parametrize("name", ["serve.yaml", "serve_gpu.yaml"])
def test_the_reviewed_configs_are_valid_for_us_and_for_serve(name: str) -> None:
    from ray.serve.schema import ServeDeploySchema

    config = read_serve_file(DEPLOYMENTS / name)
    assert config.applications["carousel"].models
    assert (config.host, config.port) == ("127.0.0.1", 8000)
    ServeDeploySchema.model_validate(yaml.safe_load((DEPLOYMENTS / name).read_text()))


def test_a_value_out_of_range_is_named_with_its_path_and_the_limit() -> None:
    message = message_for(engine={"scheduler": {"max_running": 0}})
    assert message == "models[0].engine.scheduler.max_running: got 0; must be greater than or equal to 1"


def test_every_mistake_has_its_own_line() -> None:
    message = message_for(engine={"scheduler": {"max_running": 0, "strategy": "magic"}}, replicas={"num_cpus": "two"})
    assert message.splitlines() == [
        "models[0].engine.scheduler.strategy: got 'magic'; must be 'continuous'",
        "models[0].engine.scheduler.max_running: got 0; must be greater than or equal to 1",
        "models[0].replicas.num_cpus: got 'two'; must be a valid number, unable to parse string as a number",
    ]


def test_a_misspelt_setting_is_named_with_the_right_spelling() -> None:
    message = message_for(engine={"scheduler": {"max_runing": 4}})
    assert message == "models[0].engine.scheduler.max_runing: no such setting; did you mean 'max_running'?"


def test_an_invented_setting_is_answered_with_those_that_exist() -> None:
    assert message_for(zzz=1) == "models[0].zzz: no such setting; there are name, engine, replicas"


def test_two_settings_that_contradict_each_other_are_explained() -> None:
    message = message_for(engine={"scheduler": {"max_running": 64, "max_step_tokens": 32}})
    assert message.startswith("models[0].engine.scheduler: max_step_tokens=32 is below max_running=64")


@pytest.mark.parametrize(
    ("device", "num_gpus", "words"),
    [("cuda", 0, "set num_gpus to 1"), ("cpu", 1, "set num_gpus to 0"), ("auto", 2, "at most 1")],
)
def test_a_device_that_the_reservation_does_not_grant_is_refused(device: str, num_gpus: int, words: str) -> None:
    message = message_for(engine={"model": {"device": device}}, replicas={"num_gpus": num_gpus})
    assert message.startswith(f"models[0].replicas.num_gpus: got {num_gpus}")
    assert words in message


def test_two_names_that_serve_could_not_tell_apart_are_refused() -> None:
    with pytest.raises(InvalidSetup, match=r"models\[1\].name: got 'a:b', too like 'a/b'"):
        parse({"models": [{"name": "a/b"}, {"name": "a:b"}]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("applications: [", "is not YAML"),
        ("just text", "has no list of `applications`"),
        ("applications: [{import_path: other:app}]", "import_path: deployments.application:build"),
        ("http_options: {port: high}\napplications: [{import_path: 'deployments.application:build'}]", "got 'high'"),
    ],
)
def test_a_file_that_is_no_config_is_refused_in_words(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(InvalidSetup) as caught:
        read_serve_file(path)
    assert words in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetup, match=r"nowhere.yaml: No such file"):
        read_serve_file(tmp_path / "nowhere.yaml")
