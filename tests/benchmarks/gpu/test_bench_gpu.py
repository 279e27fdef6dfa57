"""The driver of the GPU's stages: processes, deadlines, results, what a second call does, what has to be installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import benchmarks.gpu.__main__ as driver
from benchmarks.gpu.results import NO_CLAIM, STAGES, Result, Stage, report

PROJECT = Path(driver.__file__).resolve().parent.parent.parent
# Of these, nothing is where the stages run: Python packages that only other parts of the project need.
ABSENT = ("ray", "starlette", "llguidance", "msgspec", "gguf", "aiohttp", "fastapi", "httpx", "pyarrow", "uvicorn")


def lines_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture
def stage_that(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a process that runs some Python in the place of the first stage's."""

    popen = subprocess.Popen

    def replace(code: str) -> None:
        command = [sys.executable, "-c", code]
        monkeypatch.setattr(driver.subprocess, "Popen", lambda _, **options: popen(command, **options))

    return replace


def test_without_a_gpu_it_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a GPU")
    assert driver.main(["--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "torch sees no CUDA device" in said
    assert "--stand-in" in said
    assert not list(tmp_path.iterdir())


def test_a_stage_that_fails_leaves_the_end_of_what_it_said_and_the_next_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stage_that: Callable[[str], None]
) -> None:
    stage_that("raise ValueError('too small')")
    names = [stage.name for stage in STAGES[:2]]
    assert driver.main(["--out", str(tmp_path), "--stand-in", "--stages", *names]) == 1
    lines = lines_of(tmp_path)
    assert [line["stage"] for line in lines] == names
    assert all("ended with status 1" in str(line["error"]) for line in lines)
    assert capsys.readouterr().out.count("ValueError: too small") == 2


def test_a_stage_past_its_deadline_is_stopped_and_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage_that: Callable[[str], None]
) -> None:
    file = tmp_path / "rates.json"
    stage_that(f"import time; open({str(file)!r}, 'w').write('{{\"figures\": {{\"x_ms\": 3}}}}'); time.sleep(600)")
    monkeypatch.setattr(Stage, "deadline_s", 2)
    driver.main(["--out", str(tmp_path), "--stand-in", "--stages", "rates"])
    [line] = lines_of(tmp_path)
    assert "stopped after 2 s" in str(line["error"])
    assert line["figures"] == {"x_ms": 3}


def test_a_second_call_goes_on_where_the_first_stopped(tmp_path: Path, stage_that: Callable[[str], None]) -> None:
    stage_that("pass")
    call = ["--out", str(tmp_path), "--stand-in"]
    assert driver.main([*call, "--stages", "rates"]) == 0
    assert driver.main([*call, "--stages", "rates"]) == 0
    assert len(lines_of(tmp_path)) == 1
    driver.main([*call, "--budget-s", "0"])
    assert len(lines_of(tmp_path)) == 1
    driver.main([*call, "--stages", "rates", "--again"])
    assert [line["stage"] for line in lines_of(tmp_path)] == ["rates", "rates"]
    stage_that("raise SystemExit(3)")
    for _ in range(2):  # a failure is no result
        driver.main([*call, "--stages", STAGES[1].name])
    assert [line["stage"] for line in lines_of(tmp_path)][2:] == [STAGES[1].name] * 2


@pytest.mark.parametrize("note", [None, NO_CLAIM])
def test_the_table_has_every_stage_and_targets_are_judged_by_figures_of_a_gpu_alone(note: str | None) -> None:
    result = Result(
        stage="decode", code="c", device="d", at="", seconds=61.7, note=note,
        figures={"share_64x1024": 0.8, "share_256x1024": 0.5, "rate_gb_per_s": 4300.5},
        tables={"decode steps": [{"sequences": 1, "ms": 5.5}, {"sequences": 64, "ms": None}]},
    )  # fmt: skip
    text = report({"decode": result}, code="c", device="d")
    assert all(f"| {stage.name} " in text for stage in STAGES)
    assert "4,300.5" in text
    assert (f"**{NO_CLAIM}.**" in text) == (note is not None)
    assert bool(re.search(r"decode.share_64x1024 .* yes \|", text)) == (note is None)
    assert bool(re.search(r"decode.share_256x1024 .* NO \|", text)) == (note is None)
    assert re.search(r"decode.prompt_share_2048 .* not measured \|", text)


def test_stages_run_where_only_torch_triton_transformers_and_pydantic_are(tmp_path: Path) -> None:
    code = f"""
import sys
for name in {ABSENT!r}:
    sys.modules[name] = None  # an import of it raises ModuleNotFoundError
import benchmarks.gpu.__main__ as driver
import importlib
for stage in driver.STAGES:
    importlib.import_module(stage.module)
raise SystemExit(driver.main(["--run", "rates", "--stand-in", "--out", {str(tmp_path)!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "rates.json").read_text())["figures"]
    assert figures["structs"] == "dataclasses"
