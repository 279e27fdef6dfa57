"""The driver of the GPU's stages: processes, deadlines, results, what a second call does, what has to be installed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import benchmarks.gpu.__main__ as driver
from benchmarks.gpu import stage_files
from benchmarks.gpu.card import WatchedCard
from benchmarks.gpu.results import NO_CLAIM, STAGES, TARGETS, Result, Stage, report
from benchmarks.gpu.stage_files import digest_of, files_of
from benchmarks.harness.machine import PROJECT

BARE = ("torch", "triton", "transformers", "safetensors")  # are on a machine for such models


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.fixture
def stage_that(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a process that runs some Python in the place of a stage's."""

    popen = subprocess.Popen

    def replace(code: str) -> None:
        def started(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
            return popen([sys.executable, "-c", code] if "--run" in command else command, **options)

        monkeypatch.setattr(driver.subprocess, "Popen", started)

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
    names = [stage.name for stage in STAGES if stage.num_passes == 1][:2]
    assert driver.main(["--out", str(tmp_path), "--stand-in", "--stages", *names]) == 1
    lines = lines_of(tmp_path)
    assert [line["stage"] for line in lines] == names
    assert all("ended with status 1" in str(line["error"]) for line in lines)
    assert capsys.readouterr().out.count("ValueError: too small") == 2


def test_a_stage_past_its_deadline_is_stopped_and_keeps_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage_that: Callable[[str], None]
) -> None:
    file = tmp_path / "experts.json"
    stage_that(f"import time; open({str(file)!r}, 'w').write('{{\"figures\": {{\"x_ms\": 3}}}}'); time.sleep(600)")
    monkeypatch.setattr(Stage, "deadline_s", lambda stage, slow: 2 * slow)
    driver.main(["--out", str(tmp_path), "--stand-in", "--stages", "experts", "--slow", "1.5"])
    [line] = lines_of(tmp_path)
    assert "stopped after 3 s" in str(line["error"])
    assert line["figures"] == {"x_ms": 3}


def test_a_second_call_goes_on_where_the_first_stopped(tmp_path: Path, stage_that: Callable[[str], None]) -> None:
    stage_that("pass")
    call = ["--out", str(tmp_path), "--stand-in"]
    assert driver.main([*call, "--stages", "rates"]) == 0
    assert driver.main([*call, "--stages", "rates"]) == 0
    assert len(lines_of(tmp_path)) == 2  # it has two passes
    driver.main([*call, "--budget-s", "0"])
    assert len(lines_of(tmp_path)) == 2
    driver.main([*call, "--stages", "rates", "--again"])
    assert [line["stage"] for line in lines_of(tmp_path)] == ["rates"] * 4
    stage_that("raise SystemExit(3)")
    for _ in range(2):  # a failure is no result
        driver.main([*call, "--stages", "experts"])
    assert [line["stage"] for line in lines_of(tmp_path)][4:] == ["experts"] * 2


COUNTING = """
import json
with open({file!r}) as file:
    left = json.load(file)
runs = left.get("figures", {{}}).get("runs", 0) + 1
with open({file!r}, "w") as file:
    json.dump(left | {{"figures": {{"runs": runs}}}}, file)
raise SystemExit(3 if runs == 1 else 0)
"""


def test_a_stage_that_was_stopped_finds_what_it_left_until_it_comes_to_its_end(
    tmp_path: Path, stage_that: Callable[[str], None]
) -> None:
    file = tmp_path / "experts.json"
    file.write_text(json.dumps({"code": "of other files", "device": NO_CLAIM, "figures": {"runs": 7}}))
    stage_that(COUNTING.format(file=str(file)))
    call = ["--out", str(tmp_path), "--stand-in", "--stages", "experts", "--slow", "100"]
    assert [driver.main(call), driver.main(call), driver.main([*call, "--again"])] == [1, 0, 1]
    assert [line["figures"] for line in lines_of(tmp_path)] == [{"runs": runs} for runs in (1, 2, 1)]


def test_a_stage_that_lacks_something_says_so_and_is_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stage_that: Callable[[str], None]
) -> None:
    file = tmp_path / "ranks.json"
    stage_that(f'open({str(file)!r}, \'w\').write(\'{{"figures": {{"skipped": "one card"}}}}\')')
    for _ in range(2):
        assert driver.main(["--out", str(tmp_path), "--stand-in", "--stages", "ranks"]) == 0
    assert len(lines_of(tmp_path)) == 2
    assert re.search(r"\| ranks .* skipped: one card \|", capsys.readouterr().out)


def test_two_calls_of_ten_minutes_hold_both_passes_of_every_figure_with_a_target() -> None:
    plan = list(driver._passes(STAGES))
    with_targets = {stage for stage, *_ in TARGETS}
    last = max(at for at, (stage, _) in enumerate(plan) if stage.name in with_targets)
    assert {stage.name for stage, number in plan[: last + 1] if number == 2} >= with_targets
    assert len(plan[: last + 1]) == len(set(plan[: last + 1]))
    first_passes = sum(stage.expected_s for stage, number in plan[: last + 1] if number == 1)
    assert first_passes < 540
    assert sum(stage.expected_s for stage, _ in plan[: last + 1]) < 2 * 540


def test_a_stage_depends_on_what_it_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {stage.name: files_of(stage.module, stage.also) for stage in STAGES}
    assert [name for name, found in files.items() if PROJECT / "benchmarks/gpu/lora.py" in found] == ["lora"]
    assert PROJECT / "app/build.py" not in files["attention"]
    assert PROJECT / "app/model/cuda/kernels.py" in files["attention"]
    assert PROJECT / "app/kv_tiers/tier_store.py" in files["memory"]
    assert PROJECT / "deployments/cli.py" in files["service"]
    assert PROJECT / "tests/model/cuda/test_fp8.py" in files["tests"]
    monkeypatch.setattr(stage_files, "PROJECT", tmp_path)
    for name, text in {
        "app/__init__.py": "", "app/one.py": "def late():\n    from app.two import x\n", "app/two.py": "x = 1\n",
        "app/three.py": "import torch\n", "app/deep/__init__.py": "", "app/deep/kernels.py": "",
        "app/deep/by_name.py": "from importlib import import_module\n",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert tmp_path / "app/deep/kernels.py" in files_of("app.deep.by_name")
    before = digest_of("app.one"), digest_of("app.three")
    (tmp_path / "app/two.py").write_text("x = 2\n")
    assert digest_of("app.one") != before[0]
    assert digest_of("app.three") == before[1]


def test_results_of_other_files_do_not_count_unless_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    stage_that: Callable[[str], None],
) -> None:  # fmt: skip
    stage_that("pass")
    call = ["--out", str(tmp_path), "--stand-in", "--stages", "experts"]
    driver.main(call)
    monkeypatch.setattr(driver, "digest_of", lambda *_: "another")
    driver.main([*call, "--keep"])
    assert len(lines_of(tmp_path)) == 1
    assert ", other files |" in capsys.readouterr().out
    driver.main(call)
    assert [line["code"] == "another" for line in lines_of(tmp_path)] == [False, True]
    assert ", other files |" not in capsys.readouterr().out


def test_the_card_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver_program = tmp_path / "nvidia-smi"
    driver_program.write_text(
        "#!/bin/sh\ncase $2 in *compute-apps*) echo 'other.py, 400 MiB';; "
        f"*) head -1 {tmp_path}/told; sed -i 1d {tmp_path}/told;; esac\n"
    )
    driver_program.chmod(0o755)
    (tmp_path / "told").write_text(
        "345, 0, 0x0000000000000001\n1980, 99, 0x0000000000000000\n1410, 97, 0x0000000000000004\n[N/A], 9, [N/A]\n"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    card = WatchedCard()
    for _ in range(4):
        card.look()
    assert card.seen() == {"other_processes": "other.py, 400 MiB", "sm_mhz": "1410 to 1980", "slowed_by": "power cap"}
    driver_program.unlink()
    assert WatchedCard().seen() == {}


@pytest.mark.parametrize("note", [None, NO_CLAIM])
def test_the_table_has_every_stage_and_targets_are_judged_by_figures_of_a_gpu_alone(note: str | None) -> None:
    passes = [
        Result(
            stage="decode", code="c", device="d", at="", seconds=61.7, note=note,
            figures={"share_64x1024": share, "share_256x1024": 0.5, "rate_gb_per_s": 4300.5},
            tables={"decode steps": [{"sequences": 1, "ms": 5.5}, {"sequences": 64, "ms": None}]},
        )
        for share in (0.72, 0.8)
    ]  # fmt: skip
    text = report({"decode": passes}, codes={"decode": "c"}, device="d")
    assert all(f"| {stage.name} " in text for stage in STAGES)
    assert "4,300.5" in text
    assert (f"**{NO_CLAIM}.**" in text) == (note is not None)
    assert bool(re.search(r"decode.share_64x1024 .* 0.76 \| +0.72 \| +2 \| +yes \|", text)) == (note is None)
    assert bool(re.search(r"decode.share_256x1024 .* NO \|", text)) == (note is None)
    assert re.search(r"decode.prompt_share_2048 .* not measured \|", text)


@cache
def needed_by(name: str) -> frozenset[str]:
    """The package and all that it needs here, by their canonical names."""
    found, left = set(), [name]
    while left:
        name = canonicalize_name(left.pop())
        if name in found:
            continue
        try:
            lines = requires(name) or ()
        except PackageNotFoundError:  # of another machine
            continue
        found.add(name)
        left += [each.name for each in map(Requirement, lines) if each.marker is None or each.marker.evaluate()]
    return frozenset(found)


ONLY = """
import sys
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions
from packaging.utils import canonicalize_name

allowed = {allowed!r}
absent = {{
    name for name, owners in packages_distributions().items()
    if name not in ("app", "benchmarks", "_distutils_hack") and not {{*map(canonicalize_name, owners)}} & allowed
}}

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)

sys.meta_path = [Finder if each is PathFinder else each for each in sys.meta_path]
import benchmarks.gpu.__main__ as driver
import importlib
for stage in driver.STAGES:
    importlib.import_module(stage.module)
raise SystemExit(driver.main(["--run", "rates", "--stand-in", "--out", {out!r}]))
"""


def test_stages_run_where_only_torch_triton_transformers_and_pydantic_are(tmp_path: Path) -> None:
    allowed: set[str] = set().union(*map(needed_by, (*BARE, "pydantic")))
    code = ONLY.format(allowed=allowed, out=str(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "rates.json").read_text())["figures"]
    assert figures["structs"] == "dataclasses"
    page = (PROJECT / "docs" / "design" / "gpu.md").read_text()
    assert not [name for name in needed_by("pydantic") - needed_by("torch") if f"`{name}`" not in page]
