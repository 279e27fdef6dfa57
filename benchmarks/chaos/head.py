"""A service on two hosts for row R7: a head, which stores its state in Redis, and a node for everything else.

The layout is that of Kubernetes (deployments/kubernetes.yaml): another head may replace a head that has died.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.chaos.networks import HERE, own_network, why_no_networks
from benchmarks.chaos.node_loss import OBJECT_STORE_BYTES, node
from benchmarks.chaos.stage import Stage
from benchmarks.chaos.traffic import MODEL_NAME
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.http_call import Target
from benchmarks.harness.processes import kill_family
from benchmarks.harness.service import Layout, Service, ended_by_exception, got, wait_until_ready, with_token
from deployments.launcher.supervisor import environment
from deployments.serve.settings import ServeFile

_GCS_PORT, _REDIS_PORT, _HTTP_PORT = 6379, 6380, 8000  # fixed ports, because the network is private
IN_REDIS = {
    "RAY_REDIS_ADDRESS": f"{HERE}:{_REDIS_PORT}",
    "RAY_external_storage_namespace": "carousel",
    "RAY_redis_db_connect_retries": "10",
}


def why_no_head() -> str | None:
    """Return why this machine cannot run such a service; None if it can."""
    missing = None if shutil.which("redis-server") else "needs redis-server (Debian: apt-get install redis-server)"
    return why_no_networks() or missing


@contextmanager
def redis(password: str, folder: str) -> Iterator[int]:
    """Run a Redis that asks for a password and stores its data in memory; yield its pid."""
    options = {"bind": HERE, "port": str(_REDIS_PORT), "requirepass": password, "save": "", "dir": folder}
    given = [part for name, value in options.items() for part in (f"--{name}", value)]
    running = subprocess.Popen(["redis-server", *given], stdout=subprocess.DEVNULL)
    try:
        yield running.pid
    finally:
        running.terminate()
        running.wait()


def head_command(password: str) -> list[str]:
    """Return the command from docs/guide/deployment.md without `--temp-dir`. Its environment must set `IN_REDIS`."""
    return [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--log-style", "record",
        "--port", str(_GCS_PORT), "--node-ip-address", HERE, "--redis-password", password,
        "--num-cpus", "0", "--num-gpus", "0", "--object-store-memory", str(OBJECT_STORE_BYTES),
        "--include-dashboard", "false",  # saves a dozen processes: on a busy machine a raylet gives up after 15 s
    ]  # fmt: skip


# The loop restarts a head that has ended, as systemd does. Each start has a new folder: both hosts share the pids here,
# unlike real hosts, and Ray would take the processes of the other host for the old head of the same folder.
_AGAIN = 'for attempt in 1 2 3 4 5; do "${@:2}" --temp-dir "$(mktemp -d "$1/XXX")"; sleep 5; done'


@dataclass(slots=True)
class Head:
    """The host of Ray's GCS, a raylet and Serve's controller, with a shell loop that restarts them."""

    password: str  # of Redis
    folder: str
    variables: Mapping[str, str]
    nodes: list[int] = field(default_factory=list)  # the `nodes` of a Stage, which include the running head
    process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start the loop that starts and restarts the head. Does not wait for the head."""
        self.process = subprocess.Popen(
            ["bash", "-c", _AGAIN, "head", self.folder, *head_command(self.password)],
            env=self.variables, stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        self.nodes.append(self.process.pid)

    def wait_until_started(self) -> None:
        """Wait until the head runs. Raises BenchmarkError, with the output of the head, if all attempts have failed."""
        assert self.process is not None
        assert self.process.stdout is not None
        said = ""
        for line in self.process.stdout:
            said += line
            if "now block forever" in line:
                return
        raise BenchmarkError(f"the head did not start: {said[-2000:]}")

    def lost(self) -> Callable[[], None]:
        """Kill the whole head at once; return the function that starts it again."""
        self.end()
        return self.start

    def end(self) -> None:
        if self.process is not None:
            kill_family(self.process.pid)
            self.process.communicate()
            self.nodes.remove(self.process.pid)
            self.process = None


@contextmanager
def with_head(application: Mapping[str, Any]) -> Iterator[tuple[Stage, Head]]:
    """Run the service with a head, in a private network, until the end of the block."""
    password, token = secrets.token_hex(16), secrets.token_hex(32)
    layout = Layout(host="0.0.0.0", may_be_joined=True)
    with ExitStack() as block:
        block.enter_context(ended_by_exception())
        [other] = block.enter_context(own_network())
        # In /tmp, because the path of a socket must be short.
        folder = block.enter_context(TemporaryDirectory(prefix="carousel-", dir="/tmp", ignore_cleanup_errors=True))
        file = ServeFile(host=layout.host, port=_HTTP_PORT, applications={})
        head = Head(password, folder, environment(file, Path(folder), with_token(token)) | IN_REDIS)
        block.callback(head.end)
        redis_pid = block.enter_context(redis(password, folder))
        # The pid of Redis replaces that of a launcher, because all other processes are on nodes that joined.
        service = Service(
            Target.parse(f"http://{other.address}:{_HTTP_PORT}"),
            redis_pid,
            token,
            layout,
            f"{HERE}:{_GCS_PORT}",
            head.variables,
        )
        running = Stage.of(application, service, head.nodes)
        head.start()
        head.wait_until_started()
        block.enter_context(node(running, on=other))
        service.deploy({"api": {"allow_unauthenticated": True}, **application})
        assert head.process is not None
        wait_until_ready(head.process, service.target)
        yield running, head


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch that runs during the faults and must lose no row."""

    target: Target
    path: str  # the endpoint of the batch's state
    num_rows: int
    num_tokens: int  # output tokens of each row

    @classmethod
    def begin(cls, target: Target, num_rows: int, num_tokens: int = 40) -> Batch:
        body = {"model": MODEL_NAME, "prompts": ["Once"] * num_rows, "max_tokens": num_tokens, "ignore_eos": True}
        begun = json.loads(got(target, "/v1/batch", body=body | {"async": True}))
        return cls(target, f"/v1/batch/{begun['id']}", num_rows, num_tokens)

    async def counts(self) -> dict[str, int]:
        """Wait until the batch has ended; return the counts of its rows."""
        while (found := json.loads(await asyncio.to_thread(got, self.target, self.path)))["results"] is None:  # noqa: ASYNC110
            await asyncio.sleep(1)
        indexes = [row["index"] for row in found["results"]]
        lengths = [(row["response"] or {}).get("usage", {}).get("completion_tokens") for row in found["results"]]
        num_right = lengths.count(self.num_tokens)
        return {
            "rows": self.num_rows,
            "completed": num_right,
            "lost": self.num_rows - len(set(indexes)),
            "repeated": len(indexes) - len(set(indexes)),
            "different": len(indexes) - num_right,
        }
