"""Draw the pictures of the documentation: `python -m scripts.draw_pictures`. Needs matplotlib (the extra `plots`).

`overview.svg` shows the processes that a request passes and the slots of an engine over time. `packages.svg` shows the
packages of `app` and the imports between them, read from the code.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

PROJECT = Path(__file__).resolve().parent.parent
PICTURES = PROJECT / "docs" / "pictures"
# These modules have no arrows: any package may import them. `rank` is the process of a rank and uses what `build` uses.
EVERYWHERE = frozenset(
    {
        "batches",
        "child_process",
        "config",
        "cores",
        "culprits",
        "disk",
        "errors",
        "fair",
        "json_input",
        "json_pieces",
        "json_schema",
        "output_lengths",
        "progress",
        "rank",
        "records",
        "tokenizer_files",
        "usage",
        "versions",
    }
)
INK, PAPER, BLUE, GREEN, ORANGE, GREY = "#24292f", "#ffffff", "#dbeafe", "#dcfce7", "#ffedd5", "#f1f5f9"

# The position of each package in the picture: the row from the top, the first column and the number of columns.
PLACES: Mapping[str, tuple[int, int, int]] = {
    "deployments": (0, 0, 6),
    "jobs": (1, 0, 2), "build": (1, 3, 3),
    "webhooks": (2, 0, 1), "api": (2, 1, 1), "fleet": (2, 2, 1), "kv_tiers": (2, 3, 1), "grammar": (2, 4, 1),
    "model": (2, 5, 1),
    "text": (3, 0, 1), "metrics": (3, 1, 1),
    "engine": (4, 0, 6),
}  # fmt: skip
COLOURS = {"deployments": ORANGE, "engine": GREEN, "model": GREEN, "grammar": GREEN, "build": GREEN}


@dataclass(frozen=True, slots=True)
class Box:
    """A box with a title and lines of text below it; `x`, `y` are its lower left corner."""

    x: float
    y: float
    width: float
    height: float
    title: str
    lines: str = ""
    colour: str = BLUE

    @property
    def centre(self) -> tuple[float, float]:
        return self.x + self.width / 2, self.y + self.height / 2


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.draw_pictures", description="Draw the docs' pictures.")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    parser.add_argument("--out", type=Path, default=PICTURES)
    given = parser.parse_args()
    matplotlib.rcParams.update({"svg.fonttype": "path", "svg.hashsalt": "carousel", "font.family": "DejaVu Sans"})
    for name, figure in (("overview", overview()), ("packages", packages())):
        metadata = {"Date": None} if given.format == "svg" else None
        figure.savefig(given.out / f"{name}.{given.format}", facecolor=PAPER, metadata=metadata)


def overview() -> Figure:
    """Clients, ingress, replicas, and the slots of one engine over time."""
    figure, axes = _canvas(11, 3.6)
    clients = Box(0.1, 2.0, 1.7, 1.1, "clients", "HTTP, OpenAI's API,\nwhole or streamed", GREY)
    jobs = Box(0.1, 0.5, 1.7, 1.1, "batches, bulk", "many items,\nlowest class", GREY)
    ingress = Box(
        2.7, 0.8, 2.2, 2.0, "ingress", "checks, tokenizes,\nchooses a replica,\nkeeps every token,\nwrites text back"
    )
    first = Box(6.1, 2.0, 1.9, 1.1, "replica", "one engine,\none device", GREEN)
    second = Box(6.1, 0.5, 1.9, 1.1, "replica", "goes on where\nanother was lost", GREEN)
    for box in (clients, jobs, ingress, first, second):
        _draw(axes, box)
    _arrow(axes, (1.8, 2.55), (2.7, 2.3), "<->")
    _arrow(axes, (1.8, 1.05), (2.7, 1.3), "<->")
    _arrow(axes, (4.9, 2.3), (6.1, 2.55), "<->")
    _arrow(axes, (4.9, 1.3), (6.1, 1.05), "<->")
    axes.text(5.5, 1.8, "frames of\ntokens", ha="center", va="center", fontsize=8.5, color=INK)
    _slots(axes)
    axes.plot([8.0, 8.6], [2.55, 2.55], color=INK, linewidth=1, linestyle=":")
    return figure


def _slots(axes: Any) -> None:
    """Draw requests that join and leave at every step. Each entry is (slot, first step, number of steps)."""
    held = [
        (0, 0, 4), (0, 4, 6), (1, 0, 7), (1, 7, 3), (2, 1, 2), (2, 3, 5), (2, 8, 2), (3, 2, 3), (3, 5, 5),
    ]  # fmt: skip
    colours = matplotlib.colormaps["Set2"]
    left, top, step, height = 8.75, 3.05, 0.21, 0.27
    for number, (slot, start, length) in enumerate(held):
        y = top - slot * (height + 0.06) - height
        corner, size = (left + start * step + 0.015, y), (length * step - 0.03, height)
        axes.add_patch(
            FancyBboxPatch(corner, *size, boxstyle="round,pad=0,rounding_size=0.05", fc=colours(number % 8), ec="none")
        )
    bottom = top - 4 * (height + 0.06)
    for number in range(11):
        axes.plot([left + number * step] * 2, [bottom, top], color=INK, linewidth=0.4, alpha=0.25)
    axes.text(left, top + 0.12, "slots of one engine", fontsize=8.5, color=INK)
    axes.text(left, bottom - 0.25, "steps: schedule, run, update →", fontsize=8.5, color=INK)
    axes.text(
        left, bottom - 0.5, "Each colour is a request. It joins\nat the next step and leaves when\nit is done.",
        fontsize=8.5, color=INK, va="top",
    )  # fmt: skip


def packages() -> Figure:
    """The packages of `app` and `deployments`, with an arrow from each package to the packages that it imports.

    An import that follows from other imports has no arrow.
    """
    figure, axes = _canvas(13.2, 7.2)
    boxes = {name: _placed(*place, name) for name, place in PLACES.items()}
    imports = {name: [target for target in targets if target in boxes] for name, targets in imported().items()}
    for name, target in _direct({name: targets for name, targets in imports.items() if name in boxes}):
        if name != "deployments" and not (name in imports[target] and PLACES[name] > PLACES[target]):
            style = "<->" if name in imports[target] else "->"
            _connect(axes, boxes[name], boxes[target], style)
    for box in boxes.values():
        _draw(axes, box)
    axes.text(
        0.2, 0.15, "deployments imports everything in app. Every package may import config and errors. Nothing in app "
        "imports Ray. Arrows that follow from others are left out.", fontsize=8.5, color=INK,
    )  # fmt: skip
    return figure


def _direct(imports: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str]]:
    """Yield the imports that do not follow from other imports, from the top of the picture to the bottom."""
    left = {name: list(targets) for name, targets in imports.items()}
    for name in sorted(left, key=lambda name: PLACES[name]):
        for target in imports[name]:
            left[name].remove(target)
            if target not in _reached(name, left):
                left[name].append(target)
                yield name, target


def _reached(start: str, imports: Mapping[str, Sequence[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = set(imports.get(waiting.pop(), ())) - found
        found |= new
        waiting += new
    return found


def imported() -> dict[str, list[str]]:
    """Return the imported packages for each package (or module) of `app` and for `deployments`."""
    found: dict[str, set[str]] = {}
    for root in ("app", "deployments"):
        for path in sorted((PROJECT / root).rglob("*.py")):
            name = _package(".".join(path.relative_to(PROJECT).with_suffix("").parts))
            found.setdefault(name, set()).update(map(_package, _imports(path)))
    return {name: sorted(targets - EVERYWHERE - {name, ""}) for name, targets in found.items() if name}


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _package(module: str) -> str:
    """Return the package of a module: `engine` for `app.engine.scheduler`, "" for a module that is not ours."""
    root, *rest = module.split(".")
    return root if root == "deployments" else rest[0] if root == "app" and rest and rest[0] != "__init__" else ""


ABOUT: Mapping[str, str] = {
    "deployments": "Ray Serve: ingress, replicas, launcher, bulk runs",
    "jobs": "files, batches,\nbulk rows",
    "build": "joins engine\nand model",
    "api": "OpenAI's HTTP API",
    "fleet": "dispatch, frames,\nfailover",
    "grammar": "masks for\nstructured output",
    "model": "torch: forward pass,\nsampling, CPU, CUDA",
    "text": "tokenizers, stop\nstrings, tool calls",
    "kv_tiers": "KV blocks in\na folder",
    "metrics": "Prometheus text",
    "webhooks": "signed messages",
    "engine": "scheduler, strategies, policies, KV blocks: no torch",
}


def _placed(row: int, column: int, num_columns: int, name: str) -> Box:
    width, height, gap = 1.9, 0.95, 0.3
    y = 7.2 - 1.15 - row * (height + 0.4)
    x = 0.2 + column * (width + gap)
    return Box(x, y, num_columns * (width + gap) - gap, height, name, ABOUT[name], COLOURS.get(name, BLUE))


def _canvas(width: float, height: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), dpi=100)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def _draw(axes: Any, box: Box) -> None:
    style = "round,pad=0,rounding_size=0.12"
    axes.add_patch(
        FancyBboxPatch((box.x, box.y), box.width, box.height, boxstyle=style, fc=box.colour, ec=INK, linewidth=1)
    )
    x, y = box.centre
    height = 0.18 * (box.lines.count("\n") + 1)
    axes.text(x, y + height / 2 + 0.05, box.title, ha="center", va="center", fontsize=11, fontweight="bold", color=INK)
    axes.text(x, y - 0.14, box.lines, ha="center", va="center", fontsize=8.5, color=INK)


def _connect(axes: Any, upper: Box, lower: Box, style: str) -> None:
    """Draw an arrow from the bottom of one box to the top of another. The arrow is vertical if they overlap in x."""
    left, right = max(upper.x, lower.x) + 0.3, min(upper.x + upper.width, lower.x + lower.width) - 0.3
    start, end = upper.centre[0], lower.centre[0]
    if left <= right:
        start = end = min(max(lower.centre[0] if lower.width < upper.width else upper.centre[0], left), right)
    _arrow(axes, (start, upper.y), (end, lower.y + lower.height), style)


def _arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], style: str) -> None:
    arrow = {"arrowstyle": style, "color": INK, "linewidth": 1, "shrinkA": 1, "shrinkB": 1}
    axes.annotate("", xy=end, xytext=start, arrowprops=arrow)


if __name__ == "__main__":
    main()
