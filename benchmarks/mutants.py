"""Measure the share of small faults in a file that its tests notice. mutmut makes the mutants; a seed draws some.

    make mutants FILES=app/engine/block_pool.py
    python -m benchmarks.mutants app/engine/block_pool.py app/api/http/sse.py --sample 30 --seed 1

The command works in its own folder (`--folder` keeps it), with copies of `app` and `tests`. For each file, one process
runs the tests that `TESTS` names once. For each mutant, a fork of that process then runs the tests that call the
mutated function, the fastest first, until one fails. The command prints each mutant that no test noticed as a diff: the
mutant is a gap in the tests, or the same program in other words. mutmut changes the bodies of functions, one fault per
mutant. It skips functions with a decorator other than staticmethod and classmethod (so no properties). Lines that only
log or that assert an invariant of ours are not mutated. A mutant is also noticed if it computes 30 times as long as its
tests plus a minute, or sleeps for 100 seconds in all, so the load of the machine or a stop of all these processes
changes no verdict.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import chdir, suppress
from difflib import unified_diff
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.harness.command import BenchmarkError, command_parser, did_you_mean, positive, run_command, tell
from benchmarks.harness.figures import table
from benchmarks.harness.machine import PROJECT

ENGINE = "tests/engine/test_scheduler.py tests/engine/test_engine.py tests/engine/policies"
STRATEGIES, DRAFTS = "tests/engine/strategies", "tests/engine/speculation"
STEPS = "tests/engine/test_steps_in_flight.py tests/engine/test_isolation.py tests/engine/test_pooling.py"
VIEWS = "tests/engine/test_stats.py tests/engine/test_fetches.py tests/engine/trace/test_recorder.py"
API, JOBS = "tests/api/test_streaming.py tests/api/test_completions.py", "tests/jobs/test_batch_runner.py"
PARTS = "tests/api/test_reasoning.py tests/api/test_token_details.py tests/api/test_tools.py"
FLEET = "tests/fleet/test_deadly_requests.py tests/fleet/test_fleet.py tests/fleet/test_patience.py"
TESTS = {
    "app/engine/block_pool.py": "tests/engine/test_block_pool.py tests/engine/test_scheduler.py",
    "app/engine/running.py": f"{ENGINE} {STRATEGIES} tests/engine/test_running.py",
    "app/engine/waiting_queue.py": f"{ENGINE} tests/engine/test_waiting_queue.py",
    "app/engine/policies.py": f"{ENGINE} tests/engine/test_waiting_queue.py",
    "app/engine/result_processor.py": f"{ENGINE} {DRAFTS} {STEPS} tests/engine/test_engine_logprobs.py",
    "app/engine/scheduler.py": f"{ENGINE} {STRATEGIES} {DRAFTS} {STEPS} {VIEWS} tests/engine/test_whole_prompts.py",
    "app/fleet/in_flight.py": f"tests/fleet/test_in_flight.py tests/fleet/test_connection.py {FLEET}",
    "app/fleet/dispatch/ledger.py": f"tests/fleet/dispatch {FLEET}",
    "app/fleet/fleet.py": f"{FLEET} tests/fleet/test_moved_requests.py",
    "app/api/auth/limits.py": "tests/api/test_limits.py tests/api/test_admin.py",
    "app/api/http/sse.py": "tests/api/test_sse.py tests/api/test_streaming.py",
    "app/api/output/choices.py": f"{API} {PARTS} tests/api/test_stored_deltas.py tests/api/test_request_trace.py",
    "app/jobs/results.py": "tests/jobs/test_results.py tests/jobs/test_full_disk.py tests/jobs/test_backlog.py",
    "app/jobs/batch_runner.py": f"{JOBS} tests/jobs/test_bad_input.py tests/api/test_batches.py",
    "app/model/sampler.py": "tests/model/test_sampler.py",
}  # fmt: skip
COPIED = "benchmarks deployments docs models scripts Makefile Dockerfile README.md constraints.txt cluster.yaml".split()
LEFT_AS_THEY_ARE = [r"\blogger\.", r"^\s*assert "]
HANGS_AFTER_S, LOOK_EVERY_S = 100.0, 0.1
NOTICED = ("killed", "timeout", "segfault")


def main(arguments: Sequence[str] | None = None) -> int:
    return run_command(_parser(), measure, arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Try mutants of each file. Raises BenchmarkError if mutmut is missing or the tests fail without a mutant."""
    files = given.files or list(TESTS)
    for file in files:
        if file not in TESTS:
            raise BenchmarkError(f"{file} has no tests in TESTS{did_you_mean(file, TESTS)}")
    with tempfile.TemporaryDirectory() as made:
        folder = Path(given.folder or made)
        figures = {file: counted(found) for file, found in _verdicts(files, folder, given).items() if found}
    print(in_words(figures))
    return {"files": figures}


def drawn(names: Sequence[str], number: int, seed: int) -> list[str]:
    """Draw `number` of these mutants, or all if there are fewer. The draw depends on the seed, not on their order."""
    return random.Random(seed).sample(sorted(names), min(number, len(names)))


def counted(verdicts: Mapping[str, str]) -> dict[str, int]:
    """Return the number of mutants tried, of mutants noticed, and of mutants for each of mutmut's verdicts."""
    by_verdict = Counter(verdicts.values())
    return {"tried": len(verdicts), "noticed": sum(by_verdict[verdict] for verdict in NOTICED), **by_verdict}


def in_words(figures: Mapping[str, Mapping[str, int]]) -> str:
    rows = [
        [file, str(one["tried"]), str(one["noticed"]), f"{one['noticed'] / one['tried']:.0%}"]
        for file, one in figures.items()
    ]
    return table(["file", "mutants tried", "noticed", "share"], rows)


def _verdicts(files: Sequence[str], folder: Path, given: argparse.Namespace) -> dict[str, dict[str, str]]:
    """Return the verdict of each mutant, by file and mutant."""
    try:
        from mutmut.mutation.file_mutation import mutate_file_contents
    except ImportError as error:
        raise BenchmarkError(f"{error}; `make mutants` installs it") from error
    _lay_out(folder)
    found: dict[str, dict[str, str]] = {}
    with chdir(folder):  # mutmut reads its settings here
        for file in files:
            source, module = Path(file).read_text(encoding="utf-8"), file.removesuffix(".py").replace("/", ".")
            mutated = mutate_file_contents(file, source)
            names = [
                name for name in drawn(mutated.mutant_names, given.sample, given.seed) if re.search(given.only, name)
            ]
            tell(f"{file}: {len(names)} of {len(mutated.mutant_names)} mutants")
            Path(file).write_text(mutated.code, encoding="utf-8")
            verdicts = found[file] = _run([f"{module}.{name}" for name in names], TESTS[file].split())
            Path(file).write_text(source, encoding="utf-8")
            for name in names:
                if (verdict := verdicts[f"{module}.{name}"]) not in NOTICED:
                    tell(f"{name}: {verdict}\n{_diff(mutated, name)}")
    return found


def _diff(mutated: Any, name: str) -> str:
    """Return the change that one mutant makes, as a diff."""
    lines, original = mutated.code.splitlines(), f"{name.partition('__mutmut_')[0]}__mutmut_orig"
    before, after = (
        [line.replace(each, "") for line in lines[span.start - 1 : span.end]]
        for each, span in ((each, mutated.line_span_by_function_name[each]) for each in (original, name))
    )
    return "\n".join([*unified_diff(before, after, lineterm="")][2:])


def _lay_out(folder: Path) -> None:
    """Fill a folder with copies of `app` and the tests, links to the other folders, and mutmut's settings."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("app", "tests"):
        shutil.copytree(PROJECT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in COPIED:
        (folder / name).symlink_to(PROJECT / name)
    settings = f'source_paths = ["app"]\ndo_not_mutate_patterns = {json.dumps(LEFT_AS_THEY_ARE)}\n'
    project = (PROJECT / "pyproject.toml").read_text(encoding="utf-8")
    (folder / "pyproject.toml").write_text(f"{project}\n[tool.mutmut]\n{settings}", encoding="utf-8")


# ---------------------------------------------------------------------- in the process that runs tests


def _run(names: Sequence[str], tests: Sequence[str]) -> dict[str, str]:
    """Return the verdicts of these tests on mutants, which `pytest_runtestloop` writes. Raises BenchmarkError."""
    Path("mutants.json").write_text(json.dumps(names), encoding="utf-8")
    options = ["-q", "-p", "benchmarks.mutants", "-p", "no:cacheprovider", "-o", "timeout=0"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MUTANT_UNDER_TEST": "stats"}  # a fork has one thread
    with Path("pytest.log").open("wb") as log:
        command = [sys.executable, "-m", "pytest", *options, *tests]
        status = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False).returncode
    if status:
        said = Path("pytest.log").read_text(encoding="utf-8", errors="replace")
        raise BenchmarkError(f"without a mutant, pytest ended with status {status}: {said[-3000:]}")
    verdicts: dict[str, str] = json.loads(Path("verdicts.json").read_text(encoding="utf-8"))
    return verdicts


def pytest_runtestloop(session: Any) -> bool:
    """Run all tests and then the mutants. Replaces pytest's own loop when this module is a pytest plugin."""
    from mutmut.mutation import trampoline

    called: set[str] = set()
    trampoline.record_trampoline_hit = lambda name, **_: called.add(name)
    tests: defaultdict[str, list[tuple[float, Any]]] = defaultdict(list)  # for each function, with CPU seconds
    for item, following in zip(session.items, [*session.items[1:], None], strict=True):
        called.clear()
        began = time.process_time()
        if _fails(item, following):
            return True  # the session counts the failure
        for name in called:
            tests[name].append((time.process_time() - began, item))
    names = json.loads(Path("mutants.json").read_text(encoding="utf-8"))
    verdicts = {
        name: _verdict(name, sorted(tests[name.partition("__mutmut_")[0]], key=itemgetter(0))) for name in names
    }
    Path("verdicts.json").write_text(json.dumps(verdicts), encoding="utf-8")
    return True


def _fails(item: Any, following: Any) -> bool:
    num_before = item.session.testsfailed
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
    return bool(item.session.testsfailed > num_before)


def _verdict(name: str, tests: Sequence[tuple[float, Any]]) -> str:
    """Return the verdict of these tests on one mutant. The tests are sorted by their CPU seconds."""
    if not tests:
        return "no tests"
    limit_s = int(time.process_time() + 60 + 30 * sum(seconds for seconds, _ in tests))
    pid = os.fork()
    if not pid:
        with suppress(BaseException):
            os.environ["MUTANT_UNDER_TEST"] = name
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
            items = [item for _, item in tests]
            os._exit(any(map(_fails, items, [*items[1:], None])))
        os._exit(1)
    asleep_s = 0.0
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        time.sleep(LOOK_EVERY_S)
        asleep_s += LOOK_EVERY_S if _is_asleep(pid) else 0.0
        if asleep_s > HANGS_AFTER_S:
            os.kill(pid, signal.SIGKILL)
    if os.WIFSIGNALED(ended[1]):
        return "timeout" if os.WTERMSIG(ended[1]) in (signal.SIGKILL, signal.SIGXCPU) else "segfault"
    return "killed" if os.WEXITSTATUS(ended[1]) else "survived"


def _is_asleep(pid: int) -> bool:
    """Return whether all threads of a process sleep: none computes or waits for a core."""
    states: set[str] = set()
    with suppress(OSError):  # a thread may end meanwhile
        for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
            states.add(stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0])
    return states == {"S"}


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("mutants", __doc__)
    parser.add_argument("files", nargs="*", metavar="FILE", help="a file in TESTS; default: all of TESTS")
    parser.add_argument("--sample", type=positive, default=30, metavar="N", help="mutants of each file (30)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the draw (1)")
    parser.add_argument("--only", default="", metavar="REGEX", help="try only drawn mutants with names that match")
    parser.add_argument("--folder", metavar="DIR", help="keep the work in this folder, which must be new or empty")
    return parser


if __name__ == "__main__":
    sys.exit(main())
