"""The clients, their requirements, and an environment for each, made once."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.command import ran, tell
from benchmarks.harness.machine import PROJECT

INSTALL_TIMEOUT_S = 1800.0
_CONSTRAINTS = PROJECT / "constraints.txt"
_SHARED = ("torch==",)  # clients choose their other versions; clients that need torch get the project's version
PRESENT = ("ray", "curl")  # not installed: ray comes with the project, curl with the machine


@dataclass(frozen=True, slots=True)
class Client:
    """A client's package, its installation, and the module with its checks."""

    package: str
    module: str
    requirement: str = ""  # given to pip if it differs from the package's name
    also: tuple[str, ...] = ()  # requirements that the package does not declare
    before: tuple[str, ...] = ()  # packages that must be installed before the build
    options: tuple[str, ...] = ()  # options of pip
    variables: Mapping[str, str] = field(default_factory=dict, hash=False)  # environment variables of the installation
    worked_around: str = "nothing"
    is_agent: bool = False  # a coding agent from npm, whose model calls its tools

    @property
    def skipped_because(self) -> str:
        """The reason why this machine cannot have the client, or ""."""
        if self.is_agent and shutil.which("npm") is None:
            return "it comes from npm, which this machine does not have; install Node.js"
        return ""

    @property
    def requirements(self) -> tuple[str, ...]:
        return (*self.before, self.requirement or self.package, *self.also)


CLIENTS = (
    Client("openai", "benchmarks.clients.with_openai"),
    Client(
        "langchain-openai", "benchmarks.clients.with_langchain",
        worked_around="vectors with `check_embedding_ctx_length=False`: it would fetch OpenAI's tokenizer",
    ),
    Client(
        "langchain-tests", "benchmarks.clients.with_langchain_tests", also=("langchain-openai",),
        worked_around="a bias for the ends of strings and objects, which the bundled model does not find",
    ),
    Client("openai-agents", "benchmarks.clients.with_openai_agents"),
    Client("pydantic-ai-slim", "benchmarks.clients.with_pydantic_ai", requirement="pydantic-ai-slim[openai]"),
    Client("instructor", "benchmarks.clients.with_instructor"),
    Client(
        "litellm", "benchmarks.clients.with_litellm", also=("mcp",),
        worked_around="`mcp` is installed too, which it imports for calls with tools and does not require",
    ),
    Client("anthropic", "benchmarks.clients.with_anthropic"),
    Client("cohere", "benchmarks.clients.with_cohere"),
    Client("ray", "benchmarks.clients.with_ray"),
    Client("lm-eval", "benchmarks.clients.with_lm_eval", requirement="lm-eval[api,hf]==0.4.13"),
    Client(
        "aiperf", "benchmarks.clients.with_aiperf",
        worked_around="run without `HF_HUB_OFFLINE`: with it aiperf 0.13 takes no tokenizer from a folder",
    ),
    Client("guidellm", "benchmarks.clients.with_guidellm", also=("torch",)),
    # The wheels on PyPI are for CUDA and gigabytes large. Built from source for no device, vllm is pure Python, and its
    # client needs few of the packages that its server needs.
    Client(
        "vllm", "benchmarks.clients.with_vllm", requirement="vllm==0.33.0", also=("xgrammar==0.2.8", "apache-tvm-ffi"),
        before=(
            "torch", "setuptools", "setuptools-scm", "setuptools-rust", "wheel", "packaging", "jinja2", "ninja",
            "transformers>=5.16.1,<5.21.0", "fastapi>=0.133.0,<0.137.0", "llguidance>=1.7.0,<1.8.0", "aiohttp",
            "cachetools", "cbor2", "cloudpickle", "datasets", "einops", "msgspec", "openai", "orjson", "oss-harmony",
            "pandas", "partial-json-parser", "pillow", "prometheus_client", "psutil", "py-cpuinfo", "pybase64",
            "pyyaml", "pyzmq", "regex", "requests", "uvicorn", "uvloop", "watchfiles",
        ),
        options=("--no-cache-dir", "--no-build-isolation", "--no-deps", "--no-binary", "vllm"),
        variables={"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": "0.33.0"},
        worked_around="built from its sources for no device, without what only its server needs: its wheels are CUDA's",
    ),
    Client(
        "claude-code", "benchmarks.clients.with_claude_code", requirement="@anthropic-ai/claude-code", is_agent=True
    ),
    Client("codex", "benchmarks.clients.with_codex", requirement="@openai/codex", is_agent=True),
    Client("schemathesis", "benchmarks.clients.with_schemathesis"),
    Client("curl", "benchmarks.clients.with_curl"),
)  # fmt: skip


def installed(client: Client, folder: Path) -> Path:
    """Return the interpreter that has the client. Makes the environment if its requirements are new or have changed.

    Raises:
        BenchmarkError: pip or npm could not install the client; has their output and a remedy.
    """
    if client.package in PRESENT:
        return Path(sys.executable)
    environment = folder.absolute() / client.package
    python, done = environment / "bin" / "python", environment / "installed"
    asked = "\n".join(client.requirements) + "\n"
    if not done.exists() or done.read_text(encoding="utf-8") != asked:
        tell(f"{client.package}: installing {' '.join(client.requirements)}")
        began = time.monotonic()
        ran([sys.executable, "-m", "venv", "--clear", "--without-pip", str(environment)])
        if client.is_agent:
            ran(
                ["npm", "install", "--global", "--prefix", str(environment), *asked.split()],
                timeout_s=INSTALL_TIMEOUT_S,
            )
        else:
            _install_by_pip(client, environment)
        done.write_text(asked, encoding="utf-8")
        tell(f"{client.package}: installed in {time.monotonic() - began:.0f} s")
    return python


def _install_by_pip(client: Client, environment: Path) -> None:
    pins = environment / "constraints.txt"
    pins.write_text("".join(shared_pins(_CONSTRAINTS)), encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "install", "--quiet"]
    pip += ["--disable-pip-version-check", "--constraint", str(pins)]
    if client.before:
        ran([*pip, *client.before], timeout_s=INSTALL_TIMEOUT_S)
    ran(
        [*pip, *client.options, client.requirement or client.package, *client.also],
        timeout_s=INSTALL_TIMEOUT_S, env=os.environ | client.variables,
    )  # fmt: skip


def version_of(client: Client, python: Path) -> str:
    if client.is_agent:
        package = python.parent.parent / "lib" / "node_modules" / client.requirement / "package.json"
        return str(json.loads(package.read_text(encoding="utf-8"))["version"])
    if client.package == "curl":
        return ran(["curl", "--version"]).split()[1]
    return ran([str(python), "-c", f"from importlib.metadata import version; print(version({client.package!r}))"])


def shared_pins(constraints: Path) -> list[str]:
    with constraints.open(encoding="utf-8") as lines:
        return [line for line in lines if line.startswith(_SHARED)]
