"""Pictures: drawn into a PNG of a size that can be committed; refused early where they cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.engine import strategies
from benchmarks.engine.run import Run, Timeline
from benchmarks.engine.service_figures import Served, service_figures
from benchmarks.engine.step_trace import Step
from benchmarks.engine.strategies import Outcome
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.workload import TimedRequest, Workload
from tests.fakes import make_request

WORKLOAD = Workload((TimedRequest(request=make_request(request_id="a")),))


def outcome(name: str, *, load: float = 1.0, seconds: float = 2.0) -> Outcome:
    timeline = Timeline(0.0)
    timeline.deliver((7,), at_s=seconds)
    steps = [Step(began_s=0, ended_s=seconds, num_tokens={"a": 3}, num_running=1, num_waiting=0)]
    run = Run(seconds=seconds, timelines={"a": timeline})
    served = Served(run=run, joined_s={"a": 0.0}, bubble_share=0.0, steps=steps)
    return Outcome(
        name=name,
        load=load,
        rate=None,
        settings={},
        figures=service_figures(WORKLOAD, served, None),
        num_equal_outputs=1,
        served=served,
        num_slots=4,
    )


def test_the_picture_is_a_small_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.engine import pictures

    path = tmp_path / "out.png"
    outcomes = [outcome(name, load=load) for load in (0.5, 1) for name in ("static fcfs", "continuous fcfs")]
    pictures.draw(str(path), outcomes)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert path.stat().st_size < 300_000


def test_static_stands_against_continuous_and_else_the_first_against_the_last() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.engine.pictures import gantt_pair

    names = ("dynamic fcfs", "continuous fcfs", "static fcfs", "continuous sjf")
    found = {name: outcome(name) for name in names}
    assert [one.name for one in gantt_pair(list(found.values()))] == ["static fcfs", "continuous fcfs"]
    assert [one.name for one in gantt_pair([found[name] for name in names[:2]])] == list(names[:2])
    silent = replace(found["dynamic fcfs"], served=replace(found["dynamic fcfs"].served, steps=()))
    assert gantt_pair([silent]) == []


def test_a_picture_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.engine import pictures

    with pytest.raises(BenchmarkError, match="cannot be written"):
        pictures.draw(str(tmp_path / "nowhere" / "out.png"), [outcome("a b")])


def test_without_matplotlib_a_plot_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(strategies, "find_spec", lambda name: None)
    # The model and the workload do not exist: the plot is refused before they are read.
    assert strategies.main(["--model", "nowhere", "--workload", "nowhere.jsonl", "--plot", "out.png"]) == 2
    assert r"pip install -c constraints.txt -e '.[plots]'" in capsys.readouterr().err


def compared(*names: str, at_once: tuple[int, ...] = (1, 8)) -> dict[str, object]:
    workloads = {f"decode_{num}": {"decode_tokens_per_s": 100.0 * num} for num in at_once}
    return {"entries": [{"name": name, "workloads": workloads | {"prefill": {}}} for name in names]}


def test_decode_is_drawn_by_width_from_several_comparisons(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.engine import pictures

    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, found in zip(paths, (compared("ours int8", "llama.cpp Q8_0"), compared("ours bf16")), strict=True):
        path.write_text(json.dumps(found))
    picture = tmp_path / "out.png"
    assert pictures.main(["--out", str(picture), *map(str, paths)]) == 0
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    curves = pictures.decode_curves([json.loads(path.read_text()) for path in paths])
    assert list(curves) == [16, 8]
    assert set(curves[8]) == {"ours int8", "llama.cpp Q8_0"}
    assert curves[16]["ours bf16"] == [(1, 100.0), (8, 800.0)]


@pytest.mark.parametrize(
    ("found", "message"), [(compared("ours"), "none of the widths"), (compared("ours int8", at_once=()), "no figures")]
)
def test_a_comparison_without_curves_is_told(
    tmp_path: Path, found: dict[str, object], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.engine import pictures

    (tmp_path / "a.json").write_text(json.dumps(found))
    assert pictures.main(["--out", str(tmp_path / "out.png"), str(tmp_path / "a.json")]) == 2
    assert message in capsys.readouterr().err


def steps(*present: str) -> list[Step]:
    return [
        Step(began_s=at, ended_s=at + 1, num_tokens=dict.fromkeys(names, 1), num_running=len(names), num_waiting=0)
        for at, names in enumerate(present)
    ]


def test_a_request_keeps_its_slot_and_the_next_takes_the_lowest_free_one() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.engine.pictures import Holding, holdings

    assert set(holdings(steps("ab", "b", "bc"))) == {
        Holding("a", 0, 0, 1),
        Holding("b", 1, 0, 3),
        Holding("c", 0, 2, 3),
    }


def test_one_that_was_preempted_comes_again_and_idle_time_holds_nothing() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.engine.pictures import Holding, holdings

    assert holdings(steps("a", "", "a")) == [Holding("a", 0, 0, 1), Holding("a", 0, 2, 3)]


def test_no_two_requests_share_a_slot_at_one_time() -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.engine.pictures import holdings

    found = holdings(steps("abc", "bcd", "cdef", "f", "fgh"))
    for one in found:
        for other in found:
            if one is not other and one.slot == other.slot:
                assert one.ended_s <= other.began_s or other.ended_s <= one.began_s
