"""Runs the real service on a free port, started as `make serve` starts it."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.harness.command import BenchmarkError, ran
from benchmarks.harness.http_call import Target
from benchmarks.harness.machine import environment
from benchmarks.harness.processes import Process, family
from deployments.launcher.supervisor import free_ports

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
_DASHBOARD = "http://127.0.0.1:8265"
_STATUS = """
import sys, ray
from ray import serve
ray.init(sys.argv[1], namespace="serve", log_to_driver=False)
print(serve.status().applications["carousel"].status.value)
"""
_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # the launcher sets this variable to 0, unless it is set
_TEMPLATE = "chat_template.jinja"
_TOOLS = "{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def write_keys(path: Path, keys: Mapping[str, str], *, admin: str = "") -> Path:
    """Write a file of API keys and return its path. `keys`: keys by name. `admin`: the name of the admin key."""
    entries = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "admin": name == admin}
        for name, key in keys.items()
    ]
    path.write_text(json.dumps(entries))  # JSON is YAML
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The placement of a service on nodes. The default is one node with everything on loopback."""

    host: str = "127.0.0.1"  # the address that the service listens on
    may_be_joined: bool = False  # whether other nodes may join; Ray then listens on this machine's external address
    proxy_location: str = "EveryNode"
    max_replicas_per_node: Mapping[str, int] = field(default_factory=dict)  # by deployment


@dataclass(frozen=True, slots=True)
class Service:
    """A running service."""

    target: Target
    pid: int  # of the launcher, the ancestor of all processes except those on nodes that joined
    token: str = field(default="", repr=False)  # the token that Ray asks for when a node joins or a client deploys
    layout: Layout = field(default_factory=Layout)
    head: str = ""  # the address of Ray's head, if the head has no dashboard
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)  # further environment for Serve's commands

    def processes(self) -> dict[int, Process]:
        """Return all processes: launcher, driver, Ray's processes, controller, proxy, ingresses, replicas."""
        return family(self.pid)

    def deploy(self, application: Mapping[str, Any], *, num_replicas: Mapping[str, int] | None = None) -> None:
        """Replace the running application, as `serve deploy` does; return once Serve has accepted the config.

        `num_replicas`: by deployment, set outside `args`. A change of these numbers alone restarts no process.
        """
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as config:
            json.dump(serve_file(application, self.target.port, self.layout, num_replicas or {}), config)
            config.flush()
            if self.head:
                self._serve("run", config.name, "--non-blocking", "--address", self.head)
            else:
                self._serve("deploy", config.name, "-a", _DASHBOARD)

    def status(self) -> str:
        """Return the application's status from `serve status`, for example RUNNING or DEPLOY_FAILED."""
        if self.head:
            return ran([sys.executable, "-c", _STATUS, self.head], env=self._environment).splitlines()[-1]
        _, _, applications = self._serve("status", "-a", _DASHBOARD).partition("applications:")
        found = re.search(r"^ {4}status: (\w+)$", applications, re.MULTILINE)
        return "unknown" if found is None else found[1]

    def _serve(self, *command: str) -> str:
        return ran([sys.executable, "-m", "ray.serve.scripts", *command], env=self._environment)

    @property
    def _environment(self) -> dict[str, str]:
        return {**with_token(self.token), **self.variables}


def application(
    name: str,
    engine: Mapping[str, Any],
    replicas: Mapping[str, Any] = MappingProxyType({}),
    model: Mapping[str, Any] = MappingProxyType({}),
    **branches: Any,
) -> dict[str, Any]:
    """Return the `args` of a service with one model. By default, all replicas fit onto this machine.

    `replicas`, `model`: further settings of these branches. `branches`: further branches of the application.
    """
    replicas = {"num_replicas": 1, "num_cpus": 0.1, "drain_timeout_s": 5, **replicas}
    return {"models": [{"name": name, "engine": dict(engine), "replicas": replicas, **model}], **branches}


@contextmanager
def service(
    application: Mapping[str, Any],
    *,
    with_dashboard: bool = False,
    layout: Layout | None = None,
) -> Iterator[Service]:
    """Serve an application (`args` of a Serve config file) until the end of the block. Its output goes to stderr.

    `with_dashboard`: start Ray's dashboard on port 8265, which `Service.deploy` needs.

    Raises:
        BenchmarkError: the service does not start; stderr has the reason.
    """
    port, layout = next(free_ports()), layout or Layout()
    with tempfile.TemporaryDirectory(prefix="carousel-benchmark-") as folder:
        config = Path(folder) / "serve.json"
        config.write_text(json.dumps(serve_file(application, port, layout)), encoding="utf-8")  # JSON is YAML
        token = secrets.token_hex(32)
        launcher = subprocess.Popen(
            [sys.executable, "-m", "deployments.cli", "serve", str(config), *["--dashboard"] * with_dashboard],
            env=with_token(token) | ({_CLUSTER: "1"} if layout.may_be_joined else {}),
            stdout=sys.stderr,
        )
        try:
            with ended_by_exception():
                target = Target.parse(f"http://127.0.0.1:{port}")
                wait_until_ready(launcher, target)
                yield Service(target, launcher.pid, token, layout)
        finally:
            launcher.terminate()
            launcher.wait(STOP_TIMEOUT_S)


@contextmanager
def with_tools(model: Path) -> Iterator[Path]:
    """Yield a copy of a model's folder whose chat template includes the tools of a request."""
    template = (model / _TEMPLATE).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="carousel-benchmark-") as folder:
        copy = Path(folder) / "model"
        shutil.copytree(model, copy)
        if "tools" not in template:
            (copy / _TEMPLATE).write_text(_TOOLS + template, encoding="utf-8")
        yield copy


@contextmanager
def ended_by_exception() -> Iterator[None]:
    """Make SIGTERM raise SystemExit within the block, so that the context managers end the started processes."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def with_token(token: str) -> dict[str, str]:
    """Return an environment that makes Ray ask for this token."""
    return environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def serve_file(
    application: Mapping[str, Any],
    port: int = 8000,
    layout: Layout | None = None,
    num_replicas: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return a Serve config like deployments/serve.yaml, with this application (`args`)."""
    layout = layout or Layout()
    options = {"num_replicas": num_replicas, "max_replicas_per_node": layout.max_replicas_per_node}
    named = sorted({name for numbers in options.values() for name in numbers})
    return {
        "proxy_location": layout.proxy_location,
        "http_options": {"host": layout.host, "port": port},
        "logging_config": {"log_level": "INFO", "enable_access_log": False},
        "applications": [
            {
                "name": "carousel",
                "route_prefix": "/",
                "import_path": "deployments.serve.application:build",
                "args": dict(application),
                "deployments": [
                    {"name": name} | {option: numbers[name] for option, numbers in options.items() if name in numbers}
                    for name in named
                ],
            }
        ],
    }


def wait_until_ready(starter: subprocess.Popen[Any], target: Target) -> None:
    """Wait until /ready answers. Raises BenchmarkError if the time is up, or if the starting process has ended."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if starter.poll() is not None:
            raise BenchmarkError(f"the service did not start: its launcher ended with status {starter.returncode}")
        try:
            with urllib.request.urlopen(target.url("/ready"), timeout=5) as response:
                if response.status == 200:
                    return
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(0.25)
    raise BenchmarkError(f"the service was not ready after {START_TIMEOUT_S:.0f} s")


def got(
    target: Target,
    path: str,
    headers: Mapping[str, str] = MappingProxyType({}),
    timeout_s: float = 10.0,
    body: object = None,
) -> bytes:
    """Return the response to a GET, or to a POST of `body` as JSON. Raises OSError for a refusal or no answer."""
    data = None if body is None else json.dumps(body).encode()
    kind = {} if body is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(target.url(path), data, {**kind, **headers})
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        found: bytes = response.read()
        return found


def scraped(target: Target) -> list[tuple[str, str, float]]:
    """Return (name, labels, value) of every sample of /metrics."""
    text = got(target, "/metrics").decode()
    return [(name, labels, float(value)) for name, labels, value in _SAMPLE.findall(text)]


def total(samples: Iterable[tuple[str, str, float]], name: str) -> int:
    """Return the sum of a metric over all its labels."""
    return round(sum(value for found, _, value in samples if found == name))
