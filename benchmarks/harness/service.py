"""The real service in processes of its own, started as `make serve` starts it, on a port of its own."""

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
_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # which the launcher sets to 0, unless it is set
_TEMPLATE = "chat_template.jinja"
_TOOLS = "{%- if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
_SAMPLE = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def write_keys(path: Path, keys: Mapping[str, str], *, admin: str = "") -> Path:
    """Write the file of API keys of a service, from the keys by their names. `admin`: the one that opens /admin."""
    entries = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest(), "admin": name == admin}
        for name, key in keys.items()
    ]
    path.write_text(json.dumps(entries))  # JSON is YAML
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """On which nodes the parts of a service are. The default: one node, everything on loopback."""

    host: str = "127.0.0.1"  # where its clients reach it
    may_be_joined: bool = False  # by other nodes: Ray's ports are on this machine's outside address then
    proxy_location: str = "EveryNode"
    max_replicas_per_node: Mapping[str, int] = field(default_factory=dict)  # by deployment


@dataclass(frozen=True, slots=True)
class Service:
    """A running service."""

    target: Target
    pid: int  # of the launcher, from which everything else comes that has not joined
    token: str = field(default="", repr=False)  # that Ray asks for before a deployment, or when a node joins
    layout: Layout = field(default_factory=Layout)
    head: str = ""  # the address of Ray's head, where it has no dashboard
    variables: Mapping[str, str] = field(default_factory=dict, repr=False)  # more of those of what talks to it

    def processes(self) -> dict[int, Process]:
        """All of it: launcher, driver, Ray's own processes, controller, proxy, ingresses, replicas."""
        return family(self.pid)

    def deploy(self, application: Mapping[str, Any], *, num_replicas: Mapping[str, int] | None = None) -> None:
        """Put an application in the place of what runs, as `serve deploy` does; returns when Serve has been told.

        `num_replicas`: by deployment, as a Serve config file can say beside `args`: without it nothing is restarted.
        """
        with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as config:
            json.dump(serve_file(application, self.target.port, self.layout, num_replicas or {}), config)
            config.flush()
            if self.head:
                self._serve("run", config.name, "--non-blocking", "--address", self.head)
            else:
                self._serve("deploy", config.name, "-a", _DASHBOARD)

    def status(self) -> str:
        """The word of `serve status` for the application, as RUNNING or DEPLOY_FAILED."""
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
    """The `args` of a service of one model, of which all replicas fit onto this machine.

    `replicas`, `model`: more settings of these branches. `branches`: more of the application's.
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
    """Serve an application (`args` of a Serve config file) until the end of the block; what it prints goes to stderr.

    `with_dashboard`: so that it can be deployed to; costs a process more, on port 8265.

    Raises:
        BenchmarkError: it does not start; its own words are on stderr.
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
    """A copy of a model's folder with a place for tools in its chat template, where it has none."""
    template = (model / _TEMPLATE).read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix="carousel-benchmark-") as folder:
        copy = Path(folder) / "model"
        shutil.copytree(model, copy)
        if "tools" not in template:
            (copy / _TEMPLATE).write_text(_TOOLS + template, encoding="utf-8")
        yield copy


@contextmanager
def ended_by_exception() -> Iterator[None]:
    """SIGTERM raises SystemExit meanwhile, so that what this process has started ends with it."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def with_token(token: str) -> dict[str, str]:
    """An environment in which Ray asks for this token."""
    return environment() | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}


def serve_file(
    application: Mapping[str, Any],
    port: int = 8000,
    layout: Layout | None = None,
    num_replicas: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Any]:
    """As deployments/serve.yaml, with another application (`args`)."""
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
    """Return when /ready answers. Raises BenchmarkError when it does not, or what starts the service has ended."""
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
    """The body of a GET, for example of /openapi.json, or of a POST of JSON. Raises OSError when there is none, or a
    refusal.
    """
    data = None if body is None else json.dumps(body).encode()
    kind = {} if body is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(target.url(path), data, {**kind, **headers})
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        found: bytes = response.read()
        return found


def scraped(target: Target) -> list[tuple[str, str, float]]:
    """(name, labels, value) of every sample of /metrics."""
    text = got(target, "/metrics").decode()
    return [(name, labels, float(value)) for name, labels, value in _SAMPLE.findall(text)]


def total(samples: Iterable[tuple[str, str, float]], name: str) -> int:
    """The sum of a metric over its labels."""
    return round(sum(value for found, _, value in samples if found == name))
