"""Cases from public reports and from the test suites of other servers. Each request is sent and its answer is checked.

    python -m benchmarks.cases --url http://127.0.0.1:8000 --key sk-...

Without --url, the command starts a service with the bundled model as `make serve` does, with keys and batches. For each
case that fails, a line has the request, the right answer and the answer that came. The last line is one JSON object.
The exit status is 1 if a case fails. A case that no request can show names a test instead, and is only counted.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cases.checks import problems
from benchmarks.cases.exchange import Got, Service, sent
from benchmarks.harness.command import BenchmarkError, command_parser, did_you_mean, refused, tell
from benchmarks.harness.http_call import Target
from benchmarks.harness.service import application, service, with_tools, write_keys

FOLDER = Path(__file__).parent
MODEL, TOOLS_MODEL = "demo", "demo-tools"
TOOLS = {"tool_parser": "hermes"}  # the added tools part of the template does not say how the model writes calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request that this server or another server answered wrongly."""

    id: str
    source: str  # an address, a repository and the number of its issue, or `own`
    symptom: str
    right: str  # in words
    request: Mapping[str, Any] = field(default_factory=dict)
    expect: Mapping[str, Any] = field(default_factory=dict)
    elsewhere: str = ""  # the test that covers the case if no request can show it

    @property
    def needs_key(self) -> bool:
        return "$KEY" in json.dumps(self.request)


def read_cases() -> list[Case]:
    """Return all cases, in the order of their files."""
    paths = sorted(FOLDER.glob("*.jsonl"))
    return [Case(**json.loads(line)) for path in paths for line in path.read_text("utf-8").splitlines()]


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        chosen = _chosen(given.only)
        with _service(given) as running:
            return report(chosen, running)
    except BenchmarkError as error:
        return refused(error)


def report(cases: Sequence[Case], running: Service) -> int:
    """Send each case, print the cases that fail and then the counts, and return the exit status."""
    asked = [case for case in cases if case.request and (running.key or not case.needs_key)]
    num_failed = 0
    for case in asked:
        got = sent(case.request, running)
        found = problems(case.expect, got, partial(sent, service=running))
        if found:
            num_failed += 1
            print(_failure(case, got, found), flush=True)
    counts = {"cases": len(cases), "asked": len(asked), "failed": num_failed}
    print(json.dumps(counts), flush=True)
    return int(num_failed > 0)


def _failure(case: Case, got: Got, found: Sequence[str]) -> str:
    request = json.dumps(case.request, ensure_ascii=False)
    return f"{case.id} ({case.source}): {request[:600]}\n  right: {case.right}\n  got {got.status}: " + "; ".join(
        [*found, got.text[:300]]
    )


def _chosen(only: Sequence[str]) -> list[Case]:
    cases = read_cases()
    for name in only:
        if name not in {case.id for case in cases}:
            raise BenchmarkError(f"there is no case {name!r}{did_you_mean(name, [case.id for case in cases])}")
    return [case for case in cases if not only or case.id in only]


@contextmanager
def _service(given: argparse.Namespace) -> Iterator[Service]:
    if given.url is not None:
        names = {"model": given.model, "tools_model": given.tools_model or given.model}
        yield Service(target=Target.parse(given.url), key=given.key, **names)
        return
    tell("starting a service")
    key = f"sk-{secrets.token_hex(16)}"
    with tempfile.TemporaryDirectory() as folder, with_tools(Path("models/demo")) as copy:
        keys = write_keys(Path(folder) / "keys.yaml", {"cases": key}, admin="cases")
        with service(served(str(copy), keys, folder)) as running:
            yield Service(target=running.target, model=MODEL, tools_model=TOOLS_MODEL, key=key)


def served(with_place_for_tools: str, keys: Path, folder: str) -> dict[str, Any]:
    """Return the `args` of the started service: the bundled model as it is, and a copy whose template has tools."""
    paths = {MODEL: "models/demo", TOOLS_MODEL: with_place_for_tools}
    models = [
        model
        for name, path in paths.items()
        for model in application(name, {"model": {"path": path}, "cache": {"memory_gib": 0.1}}, model=TOOLS)["models"]
    ]
    return {"models": models, "api": {"keys_file": str(keys)}, "batches": {"path": folder}}


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("cases", __doc__)
    parser.add_argument("--url", help="URL of a running service")
    parser.add_argument("--key", default="", help="API key of the service at --url")
    parser.add_argument("--model", default=MODEL, metavar="NAME", help=f"a model at --url; default {MODEL}")
    parser.add_argument("--tools-model", metavar="NAME", help="a model whose template has tools; default --model")
    parser.add_argument("--only", action="append", default=[], metavar="ID", help="a case; may be given several times")
    return parser


if __name__ == "__main__":
    sys.exit(main())
