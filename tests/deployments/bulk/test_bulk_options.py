"""The command line of a bulk run: what it says before any Ray starts."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from app.errors import InvalidSetup
from app.jobs.input_files import find_files, look_through
from app.jobs.run_folder import FORMAT_VERSION, MANIFEST, SUMMARY, Summary
from deployments.bulk.__main__ import main
from deployments.bulk.options import Options, read_options

CONFIG = """
applications:
  - name: carousel
    import_path: deployments.serve.application:build
    args:
      models:
        - {name: small, engine: {scheduler: {max_running: 7}}, replicas: {num_replicas: 3}}
        - {name: large, engine: {model: {path: models/demo, dtype: bfloat16}}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "serve.yaml"
    path.write_text(CONFIG)
    return path


def options(*arguments: object) -> Options:
    return read_options(["--input", "in.jsonl", "--output", "out", *map(str, arguments)])


def test_without_a_config_it_is_the_bundled_model() -> None:
    served = options().served
    assert (served.name, served.engine.model.path) == ("demo", "models/demo")
    assert options("--model", "demo").served == served


def test_a_model_of_the_config_is_named_and_brings_its_engine(config: Path) -> None:
    small = options("--config", config, "--model", "small")
    assert (small.served.engine.scheduler.max_running, small.served.replicas.num_replicas) == (7, 3)
    assert options("--config", config, "--model", "small", "--engines", 1).served.replicas.num_replicas == 1
    with pytest.raises(InvalidSetup, match=r"defines several models \(small, large\); choose one with --model"):
        options("--config", config)


@pytest.mark.parametrize(
    ("large", "expected"),
    [
        ("engine: {model: {path: models/demoo}}", "models[1].engine.model.path: got 'models/demoo'; there is no such"),
        ("pooling: cls, adapters: {a: /nowhere}", "models[1]: pooling of large: got 'cls'"),
    ],
)
def test_mistakes_in_the_files_of_the_configs_model_are_found_before_any_engine_starts(
    large: str, expected: str, config: Path
) -> None:
    config.write_text(CONFIG.replace("engine: {model: {path: models/demo, dtype: bfloat16}}", large))
    with pytest.raises(InvalidSetup, match=re.escape(expected)) as raised:
        options("--config", config, "--model", "large")
    assert "adapters" not in str(raised.value)  # rows use none
    assert options("--config", config, "--model", "small").served.name == "small"


def test_rows_leave_nothing_in_a_tier_of_the_service(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(CONFIG.replace("scheduler: {max_running: 7}", "cache: {tiers: [{path: /kv}]}"))
    served = options("--config", path, "--model", "small").served
    assert (served.name, served.engine.cache.tiers) == ("small", ())


def test_a_folder_or_hub_id_runs_on_the_engine_of_the_config(config: Path) -> None:
    served = options("--config", config, "--model", "acme/tiny").served
    assert (served.name, served.engine.model.path, served.replicas.num_replicas) == ("acme/tiny", "acme/tiny", 3)
    with pytest.raises(InvalidSetup, match="there is no such folder"):
        options("--model", "./nothing")


def test_a_run_may_be_resumed_with_other_engines_and_not_with_other_answers(config: Path) -> None:
    here = options().description()
    assert options("--engines", 5, "--resume").description() == here
    for other in (["--max-tokens", 5], ["--temperature", 0], ["--prompt-column", "p"], ["--model", "acme/tiny"]):
        assert options(*other).description() != here


@pytest.mark.parametrize("arguments", [["--temperature", "3"], ["--prompt-column", "a", "--messages-column", "b"]])
def test_what_no_run_can_mean_is_a_mistake_of_the_command_line(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        options(*arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (None, [], "no file was found"),
        ("", [], "has no rows"),
        ('{"prompt": "a", "id": 1}\n{"prompt": "b", "id": 1}\n', [], "'1' in in.jsonl:1, in.jsonl:2"),
        ('{"text": "a"}\n', [], "no row has a prompt or messages column"),
        ('{"prompt": "a"}\n', ["--config", "nothing.yaml"], "nothing.yaml"),
    ],
)
def test_a_mistake_ends_with_1_in_words_and_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, arguments: list[str], words: str
) -> None:
    if content is not None:
        (tmp_path / "in.jsonl").write_text(content)
    had_ray = "ray" in sys.modules
    status = main(["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), *arguments])
    assert status == 1
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert ("ray" in sys.modules) == had_ray


def test_another_runs_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "run.json").write_text(json.dumps({"version": 2, "fingerprint": "another"}))
    assert main(["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), "--resume"]) == 1
    assert "contains another run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_ok", "num_failed", "arguments", "status"),
    [(2, 0, [], 0), (1, 1, [], 0), (1, 1, ["--fail-on-row-errors"], 3), (0, 2, [], 3)],
)
def test_the_exit_status_says_when_every_row_failed(
    tmp_path: Path, num_ok: int, num_failed: int, arguments: list[str], status: int
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    arguments = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out"), "--resume", *arguments]
    asked = read_options(arguments)
    found = look_through(find_files(asked.input), asked.rows)
    run = asked.description() | {"num_rows": found.num_rows, "fingerprint": found.fingerprint}
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / MANIFEST).write_text(json.dumps({"version": FORMAT_VERSION} | run))
    counts = dict.fromkeys((field.name for field in fields(Summary)), 0)
    finished = counts | {"rows": 2, "ok": num_ok, "failed": num_failed, "runs": 1}
    (tmp_path / "out" / SUMMARY).write_text(json.dumps(finished))
    assert main(arguments) == status
