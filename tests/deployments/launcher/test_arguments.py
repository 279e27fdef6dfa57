"""What people type: options of ours, and flags and commands of other servers, which get an answer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.config import ApplicationConfig
from app.config.tree import leaves
from app.errors import InvalidSetup
from deployments.cli import COMMANDS, COMMANDS_OF_OTHERS, main
from deployments.launcher.arguments import ANSWERS, OPTIONS, parsed
from deployments.launcher.trial import trial_config
from deployments.serve.settings import SERVE_YAML, read_serve_file

KNOWN = {path for path, _ in leaves(ApplicationConfig)}


def parse(*arguments: str) -> tuple[str | None, Path, dict[str, Any]]:
    given = parsed(arguments, "serve", "")
    return given.model, given.config, given.changes


def test_all_settings_that_are_named_exist() -> None:
    named = [setting for answer in ANSWERS.values() for setting in re.findall(r"models\[\]\.[a-z_.]+", answer)]
    named += [option.setting for option in OPTIONS if not option.setting.startswith("http_options.")]
    assert len(named) > 30
    assert [each for each in named if each.rstrip(".") not in KNOWN and not _is_branch(each)] == []


def _is_branch(setting: str) -> bool:
    return any(path.startswith(f"{setting}.") for path in KNOWN)


def test_options_and_answers_do_not_overlap() -> None:
    assert not {option.flag for option in OPTIONS} & ANSWERS.keys()
    assert not COMMANDS.keys() & COMMANDS_OF_OTHERS.keys()


@pytest.mark.parametrize("flag", ANSWERS)
def test_a_flag_of_another_server_gets_an_answer(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ((flag, "3"), (f"{flag}=3",), ("models/demo", flag)):
        with pytest.raises(SystemExit) as ended:
            parse(*arguments)
        assert ended.value.code == 2
        assert f"{flag} is not supported here. Instead: {ANSWERS[flag]}" in capsys.readouterr().err


@pytest.mark.parametrize("name", COMMANDS_OF_OTHERS)
def test_so_does_a_command(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "llama3"]) == 2
    assert COMMANDS_OF_OTHERS[name] in capsys.readouterr().err


def test_the_versions_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.search(r"^carousel \d.*\ntorch \d", capsys.readouterr().out, re.MULTILINE)


def test_what_is_given_is_a_model_or_a_config() -> None:
    assert parse() == (None, SERVE_YAML, {})
    assert parse("my.yaml") == (None, Path("my.yaml"), {})
    assert parse("models/demo", "--port", "81") == ("models/demo", SERVE_YAML, {"http_options.port": 81})
    assert parse("models/demo", "--config", "my.yaml") == ("models/demo", Path("my.yaml"), {})
    with pytest.raises(SystemExit):
        parse("my.yaml", "--config", "other.yaml")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(SERVE_YAML.parents[1])


def test_options_change_a_config_and_leave_the_rest(tmp_path: Path) -> None:
    assert trial_config(None) == SERVE_YAML
    config = tmp_path / "my.yaml"
    config.write_text(SERVE_YAML.read_text().replace("/batches", "/batches-of-mine"))
    given = parse(
        str(config), "--port", "81", "--served-model-name", "mine", "--max-model-len", "64", "--dtype", "bfloat16",
        "--quantization", "int8", "--replicas", "3",
    )  # fmt: skip
    path = trial_config(*given)
    assert path.name == "my-changed.yaml"
    file = read_serve_file(path)
    [served] = file.applications["carousel"].models
    model = served.engine.model
    assert (file.port, served.name, served.replicas.num_replicas) == (81, "mine", 3)
    assert (model.path, model.max_model_len, model.dtype, model.quantization) == ("models/demo", 64, "bfloat16", "int8")
    assert yaml.safe_load(path.read_text())["applications"][0]["args"]["batches"] == {
        "path": "~/.local/share/carousel/batches-of-mine"
    }


def test_a_model_takes_the_place_of_that_of_a_config(tmp_path: Path) -> None:
    config = tmp_path / "my.yaml"
    config.write_text(
        SERVE_YAML.read_text().replace("models/demo", "models/other").replace("max_running: 32", "max_running: 7")
    )
    [served] = read_serve_file(trial_config("models/demo", config)).applications["carousel"].models
    assert served.engine.model.path == str(Path("models/demo").resolve())
    assert (served.name, served.engine.scheduler.max_running, served.replicas.num_replicas) == ("demo", 7, 2)


def test_a_branch_that_is_left_empty_takes_an_option(tmp_path: Path) -> None:
    config = tmp_path / "my.yaml"
    text = SERVE_YAML.read_text()
    begin, end = text.index("http_options:"), text.index("logging_config:")
    config.write_text(f"{text[:begin]}http_options:\n{text[end:]}")
    assert read_serve_file(trial_config(*parse(str(config), "--port", "83"))).port == 83
    config.write_text("applications: [x]\n")
    with pytest.raises(InvalidSetup, match=r"^command line options require a config with one application"):
        trial_config(*parse(str(config), "--dtype", "float32"))


def test_the_default_config_by_its_relative_path_is_the_default() -> None:
    [first, second] = [
        trial_config("models/demo", Path(path)).read_text() for path in (str(SERVE_YAML), "deployments/serve.yaml")
    ]
    assert first == second


def test_an_option_of_a_model_needs_one_model(tmp_path: Path) -> None:
    document = yaml.safe_load(SERVE_YAML.read_text())
    models = document["applications"][0]["args"]["models"]
    models.append({**models[0], "name": "other"})
    config = tmp_path / "two.yaml"
    config.write_text(yaml.safe_dump(document))
    with pytest.raises(
        InvalidSetup, match=r"^--dtype: the config has 2 models, not one; set it in the config instead$"
    ):
        trial_config(*parse(str(config), "--dtype", "float32"))
    assert read_serve_file(trial_config(*parse(str(config), "--port", "82"))).port == 82


def test_a_wrong_value_of_an_option_is_told_before_a_start() -> None:
    command = [sys.executable, "-m", "deployments.cli", "serve", "--port", "81", "--dtype", "float8"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "models[0].engine.model.dtype: got 'float8'; must be" in done.stderr


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", "deployments/serve.yaml"),
        ("PORT=81", "deployments/serve.yaml --port 81"),
        ("MODEL=smollm2", '"smollm2"'),
        ("MODEL=smollm2 CONFIG=my.yaml PORT=81", '"smollm2" --config my.yaml --port 81'),
    ],
)
def test_make_passes_them_on(variables: str, expected: str) -> None:
    done = subprocess.run(["make", "-n", "serve", *variables.split()], capture_output=True, text=True, check=True)
    [line] = [line for line in done.stdout.splitlines() if "carousel serve" in line]
    assert line.split("carousel serve ")[1].split() == expected.split()
