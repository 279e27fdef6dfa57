"""A virtual environment for each client, made once."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.clients.client import Client
from benchmarks.harness.command import BenchmarkError, tell

INSTALL_TIMEOUT_S = 1800.0
_CONSTRAINTS = Path(__file__).resolve().parent.parent.parent / "constraints.txt"
_SHARED = ("torch==",)  # clients have pins of their own; but whatever needs torch takes the project's


def installed(client: Client, folder: Path) -> Path:
    """The interpreter that has the client; its environment is made, or made anew where it was made for something else.

    Raises:
        BenchmarkError: pip could not install it; its own words, and what to do.
    """
    if not client.has_own_environment:
        return Path(sys.executable)
    environment = folder.absolute() / client.package
    python, done = environment / "bin" / "python", environment / "installed"
    asked = "\n".join(client.requirements) + "\n"
    if not done.exists() or done.read_text(encoding="utf-8") != asked:
        tell(f"{client.package}: installing {' '.join(client.requirements)}")
        began = time.monotonic()
        ran([sys.executable, "-m", "venv", "--clear", str(environment)])
        pins = environment / "constraints.txt"
        pins.write_text("".join(shared_pins(_CONSTRAINTS)), encoding="utf-8")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--constraint", str(pins)]
        if client.before:
            ran([*pip, *client.before], timeout_s=INSTALL_TIMEOUT_S)
        ran(
            [*pip, *client.options, client.requirement or client.package, *client.also],
            timeout_s=INSTALL_TIMEOUT_S, variables=client.variables,
        )  # fmt: skip
        done.write_text(asked, encoding="utf-8")
        tell(f"{client.package}: installed in {time.monotonic() - began:.0f} s")
    return python


def version_of(client: Client, python: Path) -> str:
    if client.package == "curl":
        return ran(["curl", "--version"]).split()[1]
    return ran([str(python), "-c", f"from importlib.metadata import version; print(version({client.package!r}))"])


def shared_pins(constraints: Path) -> list[str]:
    with constraints.open(encoding="utf-8") as lines:
        return [line for line in lines if line.startswith(_SHARED)]


def ran(command: list[str], timeout_s: float = 120.0, variables: Mapping[str, str] = MappingProxyType({})) -> str:
    """What a command printed. Raises BenchmarkError where it fails or does not end."""
    try:
        done = subprocess.run(
            command, env=os.environ | variables, capture_output=True, text=True, check=False, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as error:
        raise BenchmarkError(f"`{' '.join(command)}` had not ended after {timeout_s:.0f} s") from error
    if done.returncode:
        raise BenchmarkError(f"`{' '.join(command)}` failed: {_errors(done.stderr)}")
    return done.stdout.strip()


def _errors(stderr: str) -> str:
    """pip's own errors without its warnings, which are many; everything where there are none."""
    lines = stderr.strip().splitlines()
    return " ".join([line for line in lines if line.startswith("ERROR:")] or lines)[-600:]
