"""The pictures of benchmarks.engine.strategies, in one PNG, and those of benchmarks.peers.compare:

    python -m benchmarks.engine.pictures --out FILE.png COMPARED.json ...

The latter draws output tokens a second in decode steps against the sequences at once, from the workloads decode_1,
decode_8 and so on: one chart for each width, which is the last word of an entry's name (`ours int8`). Needs matplotlib,
which the extra `plots` brings.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks.engine.step_trace import Step
from benchmarks.harness.command import BenchmarkError, command_parser, refused

if TYPE_CHECKING:
    from benchmarks.engine.strategies import Outcome

_WIDTH_IN, _ROW_IN, _DPI = 11.0, 3.2, 90


def draw(path: str, outcomes: Sequence[Outcome]) -> None:
    """Latency against load where there are several loads, bars at the load nearest to 1, and two Gantt charts.

    Raises:
        BenchmarkError: the picture cannot be written there.
    """
    loads = sorted({outcome.load for outcome in outcomes})
    shown_load = min(loads, key=lambda load: abs(load - 1))
    shown = [outcome for outcome in outcomes if outcome.load == shown_load]
    pair = gantt_pair(shown)
    num_rows = (len(loads) > 1) + 1 + len(pair)
    figure = Figure(figsize=(_WIDTH_IN, _ROW_IN * num_rows), dpi=_DPI, layout="constrained")
    grid = figure.add_gridspec(num_rows, 2)
    row = 0
    if len(loads) > 1:
        _latency_against_load(figure.add_subplot(grid[row, 0]), outcomes, "latency_mean_s", "mean latency, s")
        _latency_against_load(figure.add_subplot(grid[row, 1]), outcomes, "latency_p99_s", "p99 latency, s")
        row += 1
    _throughput_bars(figure.add_subplot(grid[row, 0]), shown)
    _latency_bars(figure.add_subplot(grid[row, 1]), shown)
    end_s = max(outcome.figures["seconds"] for outcome in pair) if pair else 0.0
    for number, outcome in enumerate(pair, start=row + 1):
        _gantt(figure.add_subplot(grid[number, :]), outcome, end_s=end_s)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"--plot {path} cannot be written: {error}") from error


def gantt_pair(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Static and continuous where both ran; else the first and the last that tell their steps."""
    logged = [outcome for outcome in outcomes if outcome.served.steps]
    named = {outcome.name.partition(" ")[0]: outcome for outcome in reversed(logged)}
    if {"static", "continuous"} <= named.keys():
        return [named["static"], named["continuous"]]
    return logged if len(logged) < 2 else [logged[0], logged[-1]]


def _latency_against_load(axes: Any, outcomes: Sequence[Outcome], figure: str, label: str) -> None:
    colour_of = colormaps["tab20"]
    for number, name in enumerate(dict.fromkeys(outcome.name for outcome in outcomes)):
        points = sorted((o.load, o.figures[figure]) for o in outcomes if o.name == name)
        known = [(load, seconds) for load, seconds in points if seconds is not None]
        axes.plot(
            [load for load, _ in known],
            [s for _, s in known],
            marker="o",
            markersize=3,
            color=colour_of(number % 20),
            label=name,
        )
    axes.set(xlabel="offered load", ylabel=label, yscale="log", title=f"{label.partition(',')[0]} against offered load")
    axes.legend(fontsize=6, ncols=2)
    axes.grid(alpha=0.3, which="both")


def _throughput_bars(axes: Any, outcomes: Sequence[Outcome]) -> None:
    names = [outcome.name for outcome in outcomes]
    axes.barh(names, [outcome.figures["output_tokens_per_s"] for outcome in outcomes], color="tab:blue")
    axes.set(title=f"output tokens/s, load {outcomes[0].load:g}")
    _as_list(axes)


def _latency_bars(axes: Any, outcomes: Sequence[Outcome]) -> None:
    names = [outcome.name for outcome in outcomes]
    for figure, label, colour in (
        ("latency_p99_s", "p99", "lightgrey"),
        ("latency_p95_s", "p95", "darkgrey"),
        ("latency_p50_s", "p50", "tab:orange"),
    ):
        axes.barh(names, [outcome.figures[figure] or 0.0 for outcome in outcomes], color=colour, label=label)
    means = [outcome.figures["latency_mean_s"] or 0.0 for outcome in outcomes]
    axes.plot(means, range(len(names)), "k|", markersize=8, label="mean")
    axes.set(title=f"latency, s, load {outcomes[0].load:g}")
    axes.legend(fontsize=7)
    _as_list(axes)


def _as_list(axes: Any) -> None:
    axes.invert_yaxis()
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3, axis="x")


def _gantt(axes: Any, outcome: Outcome, *, end_s: float) -> None:
    colour_of = colormaps["tab20"]
    order = {name: number for number, name in enumerate(outcome.served.run.timelines)}
    for holding in holdings(outcome.served.steps):
        axes.broken_barh(
            [(holding.began_s, holding.ended_s - holding.began_s)],
            (holding.slot + 0.05, 0.9),
            facecolor=colour_of(order[holding.request_id] % 20),
        )
    share = outcome.figures["bubble_share"] or 0.0
    axes.set(
        title=f"{outcome.name}, load {outcome.load:g}: requests in slots; {share:.0%} empty while requests waited",
        xlabel="seconds", ylabel="slot", xlim=(0, end_s), ylim=(outcome.num_slots, 0),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Holding:
    """One request in one slot, from its first to its last step in a row. Seconds."""

    request_id: str
    slot: int
    began_s: float
    ended_s: float


def holdings(steps: Sequence[Step]) -> list[Holding]:
    """Each request in the lowest slot that was free when it came; one that was preempted comes again."""
    done: list[Holding] = []
    held: dict[str, Holding] = {}
    for step in steps:
        gone = [name for name in held if name not in step.num_tokens]
        done += [held.pop(name) for name in gone]
        taken = {holding.slot for holding in held.values()}
        for name in step.num_tokens:
            if name in held:
                began_s, slot = held[name].began_s, held[name].slot
            else:
                slot = next(number for number in range(len(taken) + 1) if number not in taken)
                began_s = step.began_s
                taken.add(slot)
            held[name] = Holding(name, slot, began_s, step.ended_s)
    return [*done, *held.values()]


# Widths with one number of bits a weight share a chart.
BITS_OF = {"fp32": 32, "bf16": 16, "int8": 8, "Q8_0": 8, "int4": 4, "Q4_0": 4}
_DECODE = "decode_"

Curves = dict[str, list[tuple[int, float]]]  # by entry: sequences at once, tokens a second


def decode_curves(comparisons: Iterable[Mapping[str, Any]]) -> dict[int, Curves]:
    """By bits a weight, most first. An entry that is in several files has the points of the last.

    Raises:
        BenchmarkError: an entry's name ends with no known width, or there is no curve.
    """
    found: defaultdict[int, Curves] = defaultdict(dict)
    for entry in (entry for comparison in comparisons for entry in comparison["entries"]):
        points = [
            (int(name.removeprefix(_DECODE)), figures["decode_tokens_per_s"])
            for name, figures in entry["workloads"].items()
            if name.startswith(_DECODE) and figures["decode_tokens_per_s"] is not None
        ]
        width = entry["name"].rpartition(" ")[2]
        if points and width not in BITS_OF:
            raise BenchmarkError(f"the entry {entry['name']!r} ends with none of the widths {', '.join(BITS_OF)}")
        if points:
            found[BITS_OF[width]][entry["name"]] = sorted(points)
    if not found:
        raise BenchmarkError("there are no figures of workloads named decode_1, decode_8, ...")
    return dict(sorted(found.items(), reverse=True))


def draw_decode(path: str, curves_of: Mapping[int, Curves]) -> None:
    """One chart for each width, all to one scale. Raises BenchmarkError when the picture cannot be written."""
    figure = Figure(figsize=(_WIDTH_IN, _ROW_IN + 0.8), dpi=_DPI, layout="constrained")
    first = None
    engines = sorted({name.partition(" ")[0] for curves in curves_of.values() for name in curves}, reverse=True)
    for number, (bits, curves) in enumerate(curves_of.items(), start=1):
        axes = figure.add_subplot(1, len(curves_of), number, sharey=first)
        first = first or axes
        for name, points in curves.items():
            width = 2.5 if name.startswith("ours") else 1.2
            axes.plot(
                *zip(*points, strict=True), marker="o", markersize=4, linewidth=width, label=name,
                color=colormaps["tab10"](engines.index(name.partition(" ")[0]) % 10),
            )  # fmt: skip
        at_once = sorted({num for points in curves.values() for num, _ in points})
        axes.set(title=f"{bits} bits a weight", xlabel="sequences at once", xscale="log")
        axes.set_xticks(at_once, [str(num) for num in at_once])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    if first is not None:
        first.set(ylabel="output tokens/s", ylim=(0, None))  # once all are drawn: the scale is common
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"--out {path} cannot be written: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("engine.pictures", __doc__)
    parser.add_argument("compared", nargs="+", metavar="COMPARED.json", help="what benchmarks.peers.compare wrote")
    parser.add_argument("--out", required=True, metavar="FILE.png")
    given = parser.parse_args(arguments)
    try:
        draw_decode(given.out, decode_curves(_read(given)))
    except BenchmarkError as error:
        return refused(error)
    return 0


def _read(given: argparse.Namespace) -> list[Any]:
    try:
        return [json.loads(Path(path).read_text(encoding="utf-8")) for path in given.compared]
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"a comparison cannot be read: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
