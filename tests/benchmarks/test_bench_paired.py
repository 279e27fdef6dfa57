"""Two checkouts in turn: order, medians, ratios, failures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import paired
from benchmarks.harness.turns import last_object, median_of_ratios, turns


def checkout(folder: Path, name: str, log: Path, *, speed: int) -> Path:
    """A checkout with one benchmark, which prints one speed and writes its name into a log."""
    package = folder / name / "benchmarks"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    figures = f"dict(speed={speed}, said=sys.argv[1], commit={name!r})"
    (package / "one.py").write_text(
        f"import json, sys\nopen({str(log)!r}, 'a').write({name[0]!r})\n"
        f"print('chatter')\nprint(json.dumps({figures}))\n"
    )
    return package.parent


def test_a_benchmark_runs_in_both_checkouts_in_turn_and_each_number_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "log"
    monkeypatch.setattr(paired, "PROJECT", checkout(tmp_path, "here", log, speed=30))
    base = checkout(tmp_path, "base", log, speed=20)
    assert paired.main(["--base", str(base), "--rounds", "3", "--", "one", "an argument"]) == 0
    assert log.read_text() == "hbbhhb"
    *lines, last = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| figure")
    assert lines[2].split()[1:9:2] == ["speed", "30", "20", "1.500"]
    found = json.loads(last)
    assert found["figures"]["speed"] == {"here": 30, "base": 20, "ratio": 1.5, "ratios": [1.5, 1.5]}
    assert (found["commits"], found["options"]["arguments"]) == ({"here": "here", "base": "base"}, ["an argument"])


def test_a_base_that_fails_or_is_no_checkout_ends_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paired, "PROJECT", checkout(tmp_path, "here", tmp_path / "log", speed=30))
    assert paired.main(["--base", str(tmp_path / "nowhere"), "one", "x"]) == 2
    assert "there is no checkout of this project" in capsys.readouterr().err
    base = checkout(tmp_path, "base", tmp_path / "log", speed=20)
    assert paired.main(["--base", str(base), "--base-module", "another", "one", "x"]) == 2
    assert "benchmarks.another in" in capsys.readouterr().err


def test_turns_alternate_and_ratios_are_of_the_same_round() -> None:
    assert [name for _, name in turns("ab", rounds=3)] == list("abbaab")
    assert median_of_ratios([2, 9, 4], [1, 3, 4]) == 2.0
    assert median_of_ratios([], [1.0]) is None


def test_output_without_a_json_object_at_its_end_is_an_error() -> None:
    for stdout in ("", "no json\n", "[1]\n", '{"seconds": 1}\ndone\n'):
        with pytest.raises(paired.BenchmarkError, match="not a JSON object"):
            last_object(stdout)
