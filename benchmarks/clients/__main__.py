"""Clients that we did not write against the live service, as `make clients` runs them.

    python -m benchmarks.clients --environments .clients

Installs each client with pip into an environment of its own under that folder (once; a later run uses what is there),
starts the service with a model, and lets every client make its checks. The last lines of stdout are a table of
`docs/clients.md`. Exits with 1 when a check failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError, refused
from benchmarks.progress import tell
from benchmarks.service import service

MODEL_NAME = "demo"
CLIENT_TIMEOUT_S = 300.0
_TEMPLATE = "chat_template.jinja"
_TOOLS = "{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
_PROJECT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class Client:
    """What is installed, and the module with its checks."""

    package: str
    module: str
    also: tuple[str, ...] = ()  # what it needs beside itself and does not say


CLIENTS = (
    Client("openai", "benchmarks.clients.with_openai"),
    Client("langchain-openai", "benchmarks.clients.with_langchain"),
    Client("litellm", "benchmarks.clients.with_litellm", also=("mcp",)),  # imported for every call with tools
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one client's checks."""

    client: Client
    version: str
    num_checks: int
    problems: list[str]

    def row(self) -> str:
        passed = f"{self.num_checks - len(self.problems)} of {self.num_checks}"
        return f"| {self.client.package} | {self.version} | `python -m {self.client.module}` | {passed} |"


def main(arguments: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(arguments)
    try:
        chosen = [client for client in CLIENTS if not given.only or client.package in given.only]
        pythons = [installed(client, Path(given.environments)) for client in chosen]
        with with_tools(Path(given.model)) as model, service(application(str(model))) as running:
            url = f"http://{running.target.host}:{running.target.port}"
            outcomes = [check(client, python, url) for client, python in zip(chosen, pythons, strict=True)]
    except BenchmarkError as error:
        return refused(error)
    print("| Client | Version | Command | Checks passed |\n|---|---|---|---|")
    for outcome in outcomes:
        print(outcome.row())
    for problem in (problem for outcome in outcomes for problem in outcome.problems):
        print(problem, file=sys.stderr)
    return int(any(outcome.problems or not outcome.num_checks for outcome in outcomes))


@contextmanager
def with_tools(model: Path) -> Iterator[Path]:
    """A copy of a model's folder with a place for tools in its chat template, where it has none."""
    template = (model / _TEMPLATE).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="carousel-clients-") as folder:
        copy = Path(folder) / "model"
        shutil.copytree(model, copy)
        if "tools" not in template:
            (copy / _TEMPLATE).write_text(_TOOLS + template, encoding="utf-8")
        yield copy


def application(model: str) -> dict[str, Any]:
    """The application's `args`: one model with everything that clients ask of it, and batches."""
    replicas = {"num_replicas": 1, "num_cpus": 0.1, "drain_timeout_s": 5}
    return {
        "models": [{"name": MODEL_NAME, "engine": {"model": {"path": model}}, "replicas": replicas, "pooling": "last"}],
        "ingress": {"num_cpus": 0.1},
        "batches": {"num_cpus": 0.1},
    }


def installed(client: Client, folder: Path) -> Path:
    """The interpreter of the client's environment, which is made if it is not there. Raises BenchmarkError."""
    environment = folder.absolute() / client.package
    python = environment / "bin" / "python"
    done = environment / "installed"
    if not done.exists():
        tell(f"installing {client.package}")
        _must([sys.executable, "-m", "venv", str(environment)])
        _must(
            [
                str(python),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
                client.package,
                *client.also,
            ]
        )
        done.touch()
    return python


def check(client: Client, python: Path, url: str, model: str = MODEL_NAME) -> Outcome:
    """Let a client make its checks. One that does not get to its end has a problem more."""
    tell(f"checking {client.package}")
    variables = {"CAROUSEL_URL": url, "CAROUSEL_MODEL": model, "NO_PROXY": "127.0.0.1"}
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    ended = subprocess.run(
        [str(python), "-m", client.module], cwd=_PROJECT, env=kept | variables, capture_output=True, text=True,
        check=False, timeout=CLIENT_TIMEOUT_S,
    )  # fmt: skip
    results = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{"check"')]
    problems = [f"{client.package}: {found['check']}: {found['problem']}" for found in results if found["problem"]]
    if ended.returncode:
        problems.append(f"{client.package}: {ended.stderr.strip()[-1000:]}")
    shown = _must([str(python), "-c", f"from importlib.metadata import version; print(version({client.package!r}))"])
    return Outcome(client, shown.strip(), len(results) + bool(ended.returncode), problems)


def _must(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(f"`{' '.join(command)}` failed: {done.stderr.strip()[-1000:]}")
    return done.stdout


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description="Other people's clients.")
    parser.add_argument("--model", default="models/demo", metavar="DIR", help="folder of a transformers model")
    parser.add_argument("--environments", default=".clients", metavar="DIR", help="where the clients are installed")
    parser.add_argument(
        "--only", nargs="+", choices=[client.package for client in CLIENTS], help="these clients; default: all"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
