"""Where a step's time goes: `python -m benchmarks.engine.profile --model DIR --workload FILE.jsonl`.

Serves the workload as it is (the figure that counts), then once more with a stopwatch around each part. On a GPU the
stopwatch waits for the device at every border, so that run is slower; what a CUDA graph holds is one part.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.engine.carousel import Carousel
from benchmarks.engine.contender import measured_runs
from benchmarks.engine.engine_setup import LoadedEngine, load_engine
from benchmarks.engine.probes import DELIVERY, PARTS, RootModule, Stopwatch, probes
from benchmarks.engine.run import Run
from benchmarks.harness import machine
from benchmarks.harness.command import command_parser, report, tell
from benchmarks.harness.figures import table
from benchmarks.harness.options import Options, add_repeat_option, add_run_options, add_settings_option


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """One workload taken apart."""

    seconds: float  # without the stopwatch, the median of the repeats
    timed_seconds: float
    num_steps: int
    parts_s: dict[str, float]  # they add up to `timed_seconds`


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("engine.profile", __doc__)
    add_run_options(parser)
    add_repeat_option(parser)
    add_settings_option(parser)
    given = parser.parse_args(arguments)

    def measured() -> dict[str, Any]:
        profile, loaded = measure(Options.of(given))
        print(in_words(profile))
        return summary(profile, loaded)

    return report(measured, given)


def measure(options: Options) -> tuple[Profile, LoadedEngine]:
    """Load, warm up, repeat, then once with the stopwatch."""
    loaded = load_engine(options)
    contender, root = Carousel(loaded.engine), RootModule()
    with root.watch():
        contender.serve(loaded.workload.warm_up())
    runs = measured_runs(contender, loaded.workload, repeat=options.repeat)
    stopwatch = Stopwatch(torch.cuda.synchronize if loaded.setup.device == "cuda" else None)
    contender.forget()
    forward = getattr(loaded.engine.runner, "forward", None)
    with probes(stopwatch, forward, root.module, vocab_size=loaded.engine.facts.vocab_size) as missing:
        timed = contender.serve(loaded.workload)
    for name in missing:
        tell(f"note: there is no {name}; its time counts for the part around it")
    profile = Profile(
        seconds=statistics.median(run.seconds for run in runs),
        timed_seconds=timed.seconds,
        num_steps=timed.num_steps or 0,
        parts_s=_parts(stopwatch, timed),
    )
    return profile, loaded


def in_words(profile: Profile) -> str:
    rows = [
        [part, f"{seconds:.3f}", f"{seconds / profile.timed_seconds:.1%}", f"{1000 * seconds / profile.num_steps:.3f}"]
        for part, seconds in profile.parts_s.items()
    ]
    whole = profile.timed_seconds
    rows.append(["together", f"{whole:.3f}", "100.0%", f"{1000 * whole / profile.num_steps:.3f}"])
    return "\n".join(
        [
            table(["part", "seconds", "share", "ms a step"], rows),
            f"{profile.num_steps} steps; with the stopwatch {profile.timed_seconds:.3f} s, "
            f"without {profile.seconds:.3f} s",
        ]
    )


def summary(profile: Profile, loaded: LoadedEngine) -> dict[str, Any]:
    return {
        **asdict(loaded.setup),
        "seconds": round(profile.seconds, 4),
        "timed_seconds": round(profile.timed_seconds, 4),
        "num_steps": profile.num_steps,
        "parts_s": {part: round(seconds, 5) for part, seconds in profile.parts_s.items()},
        "gpu": machine.gpu_name(loaded.setup.device),
    }


def _parts(stopwatch: Stopwatch, run: Run) -> dict[str, float]:
    """Every part in the order of a step; what no stopwatch saw is the loop around the engine, which delivers."""
    parts = {part: stopwatch.seconds.get(part, 0.0) for part in PARTS}
    parts[DELIVERY] += run.seconds - sum(parts.values())
    return parts


if __name__ == "__main__":
    sys.exit(main())
