"""What share of small faults in a file do its tests notice? Mutants by mutmut, a seeded draw of them.

    make mutants FILES=app/engine/block_pool.py
    python -m benchmarks.mutants app/engine/block_pool.py app/api/http/sse.py --sample 30 --seed 1

Works in a folder of its own (`--folder` keeps it), where mutmut copies this checkout, runs the tests that `TESTS` names
for these files once, then for each mutant those of them that call the mutated function. Prints each mutant that no test
noticed as a diff: it is a gap in the tests, or the same program in other words. mutmut changes the bodies of functions,
but not of those with a decorator other than staticmethod and classmethod (so no properties), and one fault each. Lines
that only log or that assert an invariant of ours are left as they are. A mutant may compute 30 times as long as its
tests, and 2 minutes more; half of that is how long it may wait.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

from benchmarks.harness.command import BenchmarkError, command_parser, did_you_mean, positive, ran, run_command, tell
from benchmarks.harness.figures import table
from benchmarks.harness.machine import PROJECT

ENGINE = "tests/engine/test_scheduler.py tests/engine/test_engine.py tests/engine/policies"
STRATEGIES, DRAFTS = "tests/engine/strategies", "tests/engine/speculation"
STEPS = "tests/engine/test_overlapped_engine.py tests/engine/test_isolation.py tests/engine/test_pooling.py"
VIEWS = "tests/engine/test_stats.py tests/engine/test_fetches.py tests/engine/test_whole_prompts.py"
API, JOBS = "tests/api/test_streaming.py tests/api/test_completions.py", "tests/jobs/test_batch_runner.py"
FLEET = "tests/fleet/test_fleet.py tests/fleet/test_patience.py tests/fleet/test_deadly_requests.py"
TESTS = {
    "app/engine/block_pool.py": "tests/engine/test_block_pool.py tests/engine/test_scheduler.py",
    "app/engine/running.py": f"{ENGINE} {STRATEGIES} tests/engine/test_running.py",
    "app/engine/waiting_queue.py": f"{ENGINE} tests/engine/test_waiting_queue.py",
    "app/engine/policies.py": f"{ENGINE} tests/engine/test_waiting_queue.py",
    "app/engine/result_processor.py": f"{ENGINE} {DRAFTS} {STEPS} tests/engine/test_engine_logprobs.py",
    "app/engine/scheduler.py": f"{ENGINE} {STRATEGIES} {DRAFTS} {STEPS} {VIEWS}",
    "app/fleet/in_flight.py": f"tests/fleet/test_in_flight.py tests/fleet/test_connection.py {FLEET}",
    "app/fleet/dispatch/ledger.py": f"tests/fleet/dispatch {FLEET}",
    "app/fleet/fleet.py": FLEET,
    "app/api/auth/limits.py": "tests/api/test_limits.py tests/api/test_admin.py",
    "app/api/http/sse.py": "tests/api/test_sse.py tests/api/test_streaming.py",
    "app/api/output/choices.py": f"{API} tests/api/test_kept_deltas.py tests/api/test_token_details.py",
    "app/jobs/results.py": "tests/jobs/test_results.py tests/jobs/test_full_disk.py tests/jobs/test_backlog.py",
    "app/jobs/batch_runner.py": f"{JOBS} tests/jobs/test_bad_input.py",
    "app/model/sampler.py": "tests/model/test_sampler.py",
}  # fmt: skip
COPIED = "benchmarks deployments docs models scripts Makefile Dockerfile README.md constraints.txt cluster.yaml".split()
LEFT_AS_THEY_ARE = [r"\blogger\.", r"^\s*assert "]
WAIT_S, SLOWER = 4.0, 15.0  # a mutant may wait for (its tests' seconds + WAIT_S) * SLOWER, and compute twice as long
NOTICED = ("killed", "timeout", "segfault")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Mutants of each file. Raises BenchmarkError where mutmut is missing or the tests fail without a mutant."""
    files = given.files or list(TESTS)
    for file in files:
        if file not in TESTS:
            raise BenchmarkError(f"{file} has no tests in TESTS{did_you_mean(file, TESTS)}")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(given.folder or made)
        verdicts = _verdicts(files, folder, given)
        for name, verdict in verdicts.items():
            if verdict not in NOTICED:
                tell(ran(["mutmut", "show", name], cwd=folder))
    of_file = {file: {name: each for name, each in verdicts.items() if _module(file) in name} for file in files}
    figures = {file: counted(found) for file, found in of_file.items() if found}
    print(in_words(figures))
    return {"files": figures}


def drawn(names: Sequence[str], number: int, seed: int) -> list[str]:
    """As many of these mutants, all of them where there are fewer; the same for the same seed, whatever their order."""
    return random.Random(seed).sample(sorted(names), min(number, len(names)))


def counted(verdicts: Mapping[str, str]) -> dict[str, int]:
    """How many mutants were tried, how many of them a test noticed, and how many by each of mutmut's verdicts."""
    by_verdict = Counter(verdicts.values())
    return {"tried": len(verdicts), "noticed": sum(by_verdict[verdict] for verdict in NOTICED), **by_verdict}


def in_words(figures: Mapping[str, Mapping[str, int]]) -> str:
    rows = [
        [file, str(one["tried"]), str(one["noticed"]), f"{one['noticed'] / one['tried']:.0%}"]
        for file, one in figures.items()
    ]
    return table(["file", "mutants tried", "noticed", "share"], rows)


def _verdicts(files: Sequence[str], folder: Path, given: argparse.Namespace) -> dict[str, str]:
    """mutmut's, by the names of the mutants drawn."""
    try:
        from mutmut.mutation.file_mutation import mutate_file_contents
        from mutmut.stats import status_by_exit_code
    except ImportError as error:
        raise BenchmarkError(f"{error}; `make mutants` installs it") from error
    _lay_out(files, folder)
    chosen: list[str] = []
    with chdir(folder):  # where mutmut reads its settings
        for file in files:
            mutants = mutate_file_contents(file, Path(file).read_text(encoding="utf-8")).mutant_names
            names = [f"{_module(file)}{name}" for name in drawn(mutants, given.sample, given.seed)]
            tell(f"{file}: {len(names)} of {len(mutants)} mutants")
            chosen += [name for name in names if re.search(given.only, name)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # a process that is forked has no more
    with (folder / "mutmut.log").open("wb") as log:  # it says on stdout what fails
        command = ["mutmut", "run", "--max-children", str(given.processes), *chosen]
        status = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=False).returncode
    if status:
        said = (folder / "mutmut.log").read_text(encoding="utf-8", errors="replace")
        raise BenchmarkError(f"mutmut ended with status {status}: {said[-3000:]}")
    found: dict[str, int] = {}
    for file in files:
        kept = json.loads((folder / "mutants" / f"{file}.meta").read_text(encoding="utf-8"))
        found |= kept["exit_code_by_key"]
    return {name: status_by_exit_code[found[name]] for name in chosen}


def _module(file: str) -> str:
    """What the names of its mutants begin with."""
    return file.removesuffix(".py").replace("/", ".") + "."


def _lay_out(files: Sequence[str], folder: Path) -> None:
    """A folder with this checkout's files, by links, and with mutmut's settings for these files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("app", "tests", *COPIED):
        (folder / name).symlink_to(PROJECT / name)
    settings = {
        "source_paths": ["app"],
        "only_mutate": files,
        "also_copy": COPIED,
        "do_not_mutate_patterns": LEFT_AS_THEY_ARE,
        "pytest_add_cli_args_test_selection": sorted({test for file in files for test in TESTS[file].split()}),
        "timeout_constant": WAIT_S,
        "timeout_multiplier": SLOWER,
        "use_git_change_detection": False,
    }
    lines = [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    project = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text("\n".join([project, "[tool.mutmut]", *lines, ""]), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("mutants", __doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="of TESTS; without any, all of them")
    parser.add_argument("--sample", type=positive, default=30, metavar="N", help="mutants of each file (30)")
    parser.add_argument("--seed", type=int, default=1, help="of the draw (1)")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="of those drawn, only mutants with names that match"
    )
    parser.add_argument("--processes", type=positive, default=2, metavar="N", help="mutants at the same time (2)")
    parser.add_argument(
        "--folder", metavar="DIR", help="keep the work there, in a folder that does not exist or is empty"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
