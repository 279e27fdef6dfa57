"""`carousel serve [MODEL or CONFIG]` checks the config, sets the environment, and starts and stops the service.

The launcher consists of two processes. This process checks the config, starts `deployments.launcher.foreground` with
the environment for Ray and Serve, and waits for a signal or the child's end. It does not import Ray, so it responds
immediately and can always clean up. All processes of the service belong to the child's session and are ended before
this process exits. If the child is killed, for example because Ray's head has ended, it is restarted.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path

from app import progress
from app.batches import MAX_REQUEST_BYTES
from app.child_process import PROJECT
from app.config import ApplicationConfig
from app.errors import InvalidSetup
from app.model.location import existing_place
from deployments.launcher.arguments import parsed
from deployments.launcher.checks import MISTAKES, checked, refusal
from deployments.launcher.trial import trial_config
from deployments.open_files import MAXCONN, allow_many_files, check_connections, max_connections
from deployments.serve.settings import (
    BATCHES_CPUS,
    INGRESS_CPUS,
    LOOPBACK,
    ServeFile,
)

STOP_SIGNALS = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
STOP_TIMEOUT_S = 8.0  # how long the service may take to stop
END_TIMEOUT_S = 2.0  # how long remaining processes may take to end after SIGTERM before they are killed
MAX_RESTARTS = 3  # within RESTARTS_WITHIN_S; if the child is killed once more, the launcher exits
RESTARTS_WITHIN_S = 600.0
_LONGER_WAIT_S = 5.0  # the first restart is immediate, and each further restart waits this much longer
_OUR_PORTS = range(20_000, 30_000)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal arrives.

    Returns the exit status: 0 after a signal, 2 for mistakes that are found before Ray starts, 1 if the service fails.
    """
    given = parsed(
        sys.argv[1:] if arguments is None else arguments, "serve", "Serve a model or a config file on this machine."
    )
    # numpy, which reads GGUF files, is imported with blocked signals, because its threads would otherwise receive them.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    import_module("numpy")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    for number in STOP_SIGNALS:  # a signal during a download raises KeyboardInterrupt, which removes partial files
        signal.signal(number, signal.default_int_handler)
    path = given.config if given.model is None else Path(given.model)
    try:
        path = trial_config(given.model, given.config, given.changes)
        config, mistakes = checked(path)
        if mistakes:
            print(refusal(path, mistakes), file=sys.stderr, flush=True)
            return MISTAKES
        max_files = allow_many_files()
        warning = check_connections(max_files, os.environ.get(MAXCONN))
        # From now on, signals stay pending until `sigwait` receives them, so they cannot interrupt starts and stops.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS | {signal.SIGCHLD})
    except InvalidSetup as error:
        print(refusal(path, str(error).splitlines()), file=sys.stderr, flush=True)
        return MISTAKES
    except KeyboardInterrupt:
        return 0
    if warning:
        print(f"Warning: {warning}", flush=True)
    # TMPDIR is ignored, because Ray and HAProxy create sockets here, and a socket's path is limited to 97 characters.
    run_folder = Path(tempfile.mkdtemp(prefix="carousel-", dir="/tmp"))
    (run_folder / "progress").mkdir()
    command = [sys.executable, "-m", "deployments.launcher.foreground", *["--dashboard"] * given.dashboard]
    command += [str(os.getpid()), str(path), str(run_folder), str(reserved_cpus(config))]
    variables = environment(config, run_folder, os.environ, max_files=max_files)
    status = keep_serving(command, variables)
    if status == 0:
        shutil.rmtree(run_folder, ignore_errors=True)
    else:
        print(f"See the logs in {run_folder}/session_latest/logs.", file=sys.stderr, flush=True)
    return status


def keep_serving(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run the child until a signal arrives or the child exits. Restarts a killed child. Returns the exit status."""
    restarted_s: list[float] = []
    while True:
        child = subprocess.Popen(command, env=variables, start_new_session=True)
        status = supervise(child)
        if status == 0 or child.returncode >= 0:
            return status
        now_s = time.monotonic()
        restarted_s = [each for each in restarted_s if now_s - each < RESTARTS_WITHIN_S]
        killed, within = signal.Signals(-child.returncode).name, f"within {RESTARTS_WITHIN_S / 60:g} minutes"
        if len(restarted_s) == MAX_RESTARTS:
            print(f"The service was killed ({killed}) {MAX_RESTARTS + 1} times {within}. Exiting.", file=sys.stderr)
            return 1
        wait_s = _LONGER_WAIT_S * len(restarted_s)
        restarted_s.append(now_s)
        print(
            f"The service was killed ({killed}). Restarting it {f'in {wait_s:g} s' if wait_s else 'now'} "
            f"({len(restarted_s)} of at most {MAX_RESTARTS} restarts {within}). Open streams are lost; "
            f"batches will resume.",
            flush=True,
        )
        if signal.sigtimedwait(STOP_SIGNALS, wait_s) is not None:
            return 0


def supervise(child: subprocess.Popen[bytes]) -> int:
    """Wait for a signal (returns 0) or the child's end (returns 1), then end all processes in the child's session."""
    received = signal.SIGCHLD
    while received == signal.SIGCHLD and child.poll() is None:
        received = signal.Signals(signal.sigwait(STOP_SIGNALS | {signal.SIGCHLD}))
    if received != signal.SIGCHLD:
        print("Stopping.", flush=True)
        child.terminate()
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while child.poll() is None and time.monotonic() < deadline:
        signal.sigtimedwait({signal.SIGCHLD}, max(0.0, deadline - time.monotonic()))
    if child.poll() is None:
        print(f"The service did not stop within {STOP_TIMEOUT_S:g} s. Killing it.", file=sys.stderr, flush=True)
    _end_session(child.pid)
    child.wait()
    return 0 if received != signal.SIGCHLD else 1


def environment(
    config: ServeFile, run_folder: Path, inherited: Mapping[str, str], *, max_files: int = 1024
) -> dict[str, str]:
    """Return the child's environment: Serve's fast modes, the run's files in `run_folder`, and Ray on loopback.

    The caller's variables take precedence, except those that would affect another cluster. `max_files` is the number of
    files that each process may open.
    """
    ours = {
        progress.FOLDER: f"{run_folder}/progress",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PROJECT), inherited.get("PYTHONPATH")])),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{run_folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{run_folder}/admin.sock",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{run_folder}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(run_folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{run_folder}/server-state",
    }
    free = free_ports()
    defaults = {
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # The default limit for calls between deployments, 4 MiB, is too small for a stored request body of 4 MiB.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2 * MAX_REQUEST_BYTES),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(next(free)),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(next(free)),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(next(free)),
        "RAY_USAGE_STATS_ENABLED": "0",
        # Each Ray worker imports this module while waiting for work.
        "RAY_preload_python_modules": "deployments.preload",
        # Nothing reads this socket, because the ingress logs requests. By default, Ray opens a UDP port for the log.
        "RAY_SERVE_HAPROXY_LOG_TARGET": f"{run_folder}/log.sock",
        # The default of 4,096 connections requires 10,265 files. HAProxy does not start if it may open fewer.
        MAXCONN: str(max_connections(max_files)),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(num_proxy_threads(os.cpu_count() or 1)),
        # By default, three consecutive failed connections redirect all traffic to Serve's own proxy, which cannot reach
        # the ingresses and responds with 500. HAProxy retries a failed connection in any case, if possible with another
        # ingress, and detects dead ingresses by health checks.
        "RAY_SERVE_HAPROXY_OBSERVE_MARK_DOWN_ENABLED": "0",
        # When the ingresses change, a new HAProxy takes over, and the old one may finish its streams within this time
        # (default: 120 s). HAProxy's timeout for silent clients is the same.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        # By default, Serve's controller checks for changes ten times a second, which uses most of an idle service's CPU
        # time. When a replica dies, its streams do not wait for the controller: the ingress loses the connection.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        # Without HAProxy, no client can connect. The controller replaces HAProxy after three failed checks. By default,
        # it checks every ten seconds, so the service would be down for half a minute.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
        # With Ray's default niceness of 15, a worker gets 3.4% of a core next to another busy process in the same
        # session or container. Between sessions, niceness has no effect, because Linux divides cores by session first.
        "RAY_worker_niceness": "0",
        # By default, Ray measures each call of its timers for its logs, and all of the node's processes every five
        # seconds for its dashboard. Together, this uses a tenth of an idle service's CPU time.
        "RAY_event_stats": "0",
        "REPORTER_UPDATE_INTERVAL_MS": "20000",
        # Serve kills a proxy that fails three consecutive checks. With the default of 5 s, startup failed on a busy
        # machine, although Serve otherwise waits a minute for a proxy.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
    }
    if config.host in LOOPBACK:
        # Makes Ray use a loopback address. Otherwise, Ray uses an external address if the machine can form a cluster.
        defaults["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if _all_models_are_local(config):
        defaults["HF_HUB_OFFLINE"] = "1"
    kept = {name: value for name, value in inherited.items() if name != "RAY_ADDRESS"}
    return defaults | kept | ours


def reserved_cpus(file: ServeFile) -> float:
    """Return the CPUs that replicas, ingresses and batches reserve in total when fully scaled up."""

    def of(config: ApplicationConfig) -> float:
        replicas = sum(model.replicas.max_replicas * model.replicas.reserved_cpus for model in config.models)
        batches = BATCHES_CPUS if config.batches else 0.0
        ingresses = (config.ingress.num_replicas + 1) * INGRESS_CPUS  # during an update, there is one more
        return replicas + ingresses + batches

    return sum(map(of, file.applications.values()))


def num_proxy_threads(num_cores: int) -> int:
    """Return the number of HAProxy threads. HAProxy needs one per four cores for the streams of all ingresses."""
    max_proxy_threads = 4  # Serve's default
    return max(1, min(max_proxy_threads, num_cores // 4))


def _all_models_are_local(config: ServeFile) -> bool:
    models = [model for served in config.applications.values() for model in served.models]
    return all(existing_place(path) for model in models for path in model.engine.model_paths.values())


def free_ports() -> Iterator[int]:
    """Yield ports on which no process is listening, each at most once.

    Neither the kernel (32768 and up) nor Ray (10002-19999, 30000 and up) chooses ports from this range, so a port stays
    free until it is used.
    """
    for port in random.sample(_OUR_PORTS, len(_OUR_PORTS)):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("0.0.0.0", port))
            except OSError:
                continue
        yield port


def _end_session(session: int) -> None:
    """End all processes in a session, first with SIGTERM and then with SIGKILL."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + END_TIMEOUT_S
        for pid in session_members(session):
            try:
                os.kill(pid, sent)
            except ProcessLookupError:
                continue
        # The remaining processes are not children of this process, so it cannot wait for them.
        while session_members(session) and time.monotonic() < deadline:
            time.sleep(0.05)


def session_members(session: int) -> list[int]:
    """Return the ids of the live processes in a session. Empty on a system without /proc."""
    members = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # pid (name with anything) state ppid pgrp session ...
            state, _, _, owner = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(owner) == session and state != "Z":
            members.append(int(folder.name))
    return members
