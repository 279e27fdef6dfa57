"""Run clients that we did not write against the live service; `make clients` calls this command.

    python -m benchmarks.clients --environments .clients

Installs each client with pip or npm into its own environment in that folder (once; later runs use the environment),
starts the service with a model, and lets every client make its checks. Coding agents use a second service, with a model
that calls their tools. The last lines of stdout are a table of `docs/results/features.md` and the commands that the
clients ran. If a client cannot be installed, its row says so and the other clients still run. A client from npm is
skipped if the machine has no npm. The exit status is 1 if a check failed or a client could not be installed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.clients.environments import CLIENTS, Client, installed, version_of
from benchmarks.clients.scripted_model import scripted_model
from benchmarks.harness.command import BenchmarkError, command_parser, refused, tell
from benchmarks.harness.machine import PROJECT
from benchmarks.harness.service import application, service, with_tools

MODEL_NAME = "demo"
CLIENT_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one client's checks."""

    client: Client
    version: str = "not installed"
    num_checks: int = 0
    problems: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)  # commands that ran the client's own programs
    is_skipped: bool = False

    @property
    def has_passed(self) -> bool:
        return self.is_skipped or (bool(self.num_checks) and not self.problems)

    def row(self) -> str:
        passed = f"{self.num_checks - len(self.problems)} of {self.num_checks}" if self.num_checks else "none"
        command = f"`make clients CLIENTS={self.client.package}`"
        return f"| {self.client.package} | {self.version} | {command} | {passed} | {self.client.worked_around} |"


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    chosen = [client for client in CLIENTS if not given.only or client.package in given.only]
    try:
        outcomes = _outcomes(chosen, Path(given.environments), Path(given.model))
    except BenchmarkError as error:
        return refused(error)
    print("| Client | Version | Command | Checks passed | Worked around |\n|---|---|---|---|---|")
    for outcome in outcomes:
        print(outcome.row())
    for outcome in outcomes:
        print("".join(f"\n# {outcome.client.package}\n" * bool(outcome.commands)), *outcome.commands, sep="\n", end="")
    return int(not all(outcome.has_passed for outcome in outcomes))


def _outcomes(clients: Sequence[Client], environments: Path, model: Path) -> list[Outcome]:
    """Return an outcome for each client, in their order. Raises BenchmarkError if the service does not start."""
    pythons: dict[Client, Path] = {}
    found: dict[Client, Outcome] = {}
    for client in clients:
        if client.skipped_because:
            found[client] = Outcome(client, version=f"skipped: {client.skipped_because}", is_skipped=True)
            tell(f"{client.package}: {found[client].version}")
            continue
        try:
            pythons[client] = installed(client, environments)
        except BenchmarkError as error:
            found[client] = Outcome(client, problems=[f"{client.package}: not installed: {error}"])
            tell(found[client].problems[0])
    for is_agent, folder in ((False, with_tools(model)), (True, scripted_model())):
        asking = {client: python for client, python in pythons.items() if client.is_agent == is_agent}
        if asking:
            with folder as copy, service(served(str(copy))) as running:
                url = f"http://{running.target.host}:{running.target.port}"
                found |= {client: check(client, python, url, folder=copy) for client, python in asking.items()}
    return [found[client] for client in clients]


def served(model: str) -> dict[str, Any]:
    """Return the application's `args`: one model with all features that the clients use, and batches."""
    # The bundled model's template shows no format of calls. With a parser, calls may be offered without being forced.
    branch = {"pooling": "last", "tool_parser": "hermes"}
    settings = {"path": model, "dtype": "float32"}  # equal to lm-eval's own model, even if bfloat16 is fast
    return application(MODEL_NAME, {"model": settings}, model=branch, batches={})


def check(client: Client, python: Path, url: str, model: str = MODEL_NAME, folder: Path | None = None) -> Outcome:
    """Let a client make its checks. A client that does not finish has one more problem."""
    tell(f"{client.package}: checking")
    with tempfile.TemporaryDirectory(prefix="carousel-clients-") as temporary:
        status, stdout, stderr = _ended(
            [str(python), "-m", client.module],
            {
                "CAROUSEL_URL": url, "CAROUSEL_MODEL": model, "CAROUSEL_MODEL_FOLDER": str(folder or "models/demo"),
                "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "1", "HF_HOME": temporary, "TMPDIR": temporary,
            },
        )  # fmt: skip
    told = [json.loads(line) for line in stdout.splitlines() if line.startswith(('{"check"', '{"command"', '{"note"'))]
    results = [line for line in told if "check" in line]
    problems = [f"{client.package}: {found['check']}: {found['problem']}" for found in results if found["problem"]]
    if status:
        problems.append(f"{client.package}: {stderr.strip()[-1000:]}")
    notes = [f"{client.package}: {line['note']}" for line in told if "note" in line]
    num_checks = len(results) + bool(status)
    tell(
        "\n".join([f"{client.package}: {num_checks - len(problems)} of {num_checks} checks passed", *notes, *problems])
    )
    commands = [line["command"] for line in told if "command" in line]
    return Outcome(client, version_of(client, python), num_checks, problems, commands)


def _ended(command: list[str], variables: dict[str, str]) -> tuple[int, str, str]:
    """Return (status, stdout, stderr) of a client's checks. A timeout kills all processes that they started."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    with subprocess.Popen(
        command, cwd=PROJECT, env=kept | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    ) as page:  # fmt: skip
        try:
            stdout, stderr = page.communicate(timeout=CLIENT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(page.pid, signal.SIGKILL)
            stdout, stderr = page.communicate()
            return 1, stdout, f"not finished after {CLIENT_TIMEOUT_S:.0f} s"
    return page.returncode, stdout, stderr


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("clients", "Other people's clients.")
    parser.add_argument("--model", default="models/demo", metavar="DIR", help="folder of a transformers model")
    parser.add_argument("--environments", default=".clients", metavar="DIR", help="where the clients are installed")
    parser.add_argument(
        "--only", nargs="+", choices=[client.package for client in CLIENTS], help="run only these clients; default: all"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
