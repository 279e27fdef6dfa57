"""The pictures of benchmarks.engine.strategies, in one PNG. Needs matplotlib, which the extra `plots` brings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib import colormaps
from matplotlib.figure import Figure

from benchmarks.engine.step_trace import Step
from benchmarks.harness.command import BenchmarkError

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
