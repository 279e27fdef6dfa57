"""`carousel serve [MODEL or CONFIG]`: it checks, sets the environment, starts and stops.

Two processes. This one checks the config and the ports, starts `deployments.launcher.foreground` with the environment
that Ray and Serve read, and waits for a signal or for its end. It imports no Ray, so it answers at once
and always lives to clean up: whatever the child started is in the child's session, and none of it outlives this
process. A child that was killed, as it is when Ray's head ends, is started again.
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
STOP_TIMEOUT_S = 8.0  # for the service to end by itself
END_TIMEOUT_S = 2.0  # for the remaining processes to end after SIGTERM; then they are killed
MAX_RESTARTS = 3  # within RESTARTS_WITHIN_S; then the service stays ended
RESTARTS_WITHIN_S = 600.0
_LONGER_WAIT_S = 5.0  # before each restart within that time than before the last; the first does not wait
_OUR_PORTS = range(20_000, 30_000)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal comes.

    The exit status is 0 after a signal, 2 for mistakes that are found before Ray starts, 1 when the service cannot
    start or has died.
    """
    given = parsed(sys.argv[1:] if arguments is None else arguments, "serve", "Serve a model or a config file here.")
    # numpy reads GGUF files. Its threads must not take the signals that this process waits for later.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    import_module("numpy")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    for number in STOP_SIGNALS:  # a model may be fetched now: what is not whole goes
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
        # Blocked from here on: a signal waits until this process asks for it, and cannot interrupt a start or an end.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS | {signal.SIGCHLD})
    except InvalidSetup as error:
        print(refusal(path, str(error).splitlines()), file=sys.stderr, flush=True)
        return MISTAKES
    except KeyboardInterrupt:
        return 0
    if warning:
        print(f"Warning: {warning}", flush=True)
    # In /tmp whatever TMPDIR says: Ray and HAProxy put sockets inside, and a socket's path may have 97 characters.
    run_folder = Path(tempfile.mkdtemp(prefix="carousel-", dir="/tmp"))
    (run_folder / "progress").mkdir()
    command = [sys.executable, "-m", "deployments.launcher.foreground", *["--dashboard"] * given.dashboard]
    command += [str(os.getpid()), str(path), str(run_folder), str(reserved_cpus(config))]
    variables = environment(config, run_folder, os.environ, max_files=max_files)
    status = keep_serving(command, variables)
    if status == 0:
        shutil.rmtree(run_folder, ignore_errors=True)
    else:
        print(f"The logs are kept in {run_folder}/session_latest/logs.", file=sys.stderr, flush=True)
    return status


def keep_serving(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run the child until a signal comes or it ends by itself; when it was killed, start it again. The exit status."""
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
            print(f"The service was killed ({killed}), {MAX_RESTARTS + 1} times {within}: giving up.", file=sys.stderr)
            return 1
        wait_s = _LONGER_WAIT_S * len(restarted_s)
        restarted_s.append(now_s)
        print(
            f"The service was killed ({killed}). It starts anew {f'in {wait_s:g} s' if wait_s else 'now'} "
            f"({len(restarted_s)} of at most {MAX_RESTARTS} restarts {within}). Streams that ran are cut off; "
            f"batches go on.",
            flush=True,
        )
        if signal.sigtimedwait(STOP_SIGNALS, wait_s) is not None:
            return 0


def supervise(child: subprocess.Popen[bytes]) -> int:
    """Wait for a signal or for the child's end, then leave nothing of the child's session behind."""
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
        print(f"It has not ended by itself within {STOP_TIMEOUT_S:g} s: killing it.", file=sys.stderr, flush=True)
    _end_session(child.pid)
    child.wait()
    return 0 if received != signal.SIGCHLD else 1


def environment(
    config: ServeFile, run_folder: Path, inherited: Mapping[str, str], *, max_files: int = 1024
) -> dict[str, str]:
    """The child's environment: the fast modes of Serve, everything of this run in its own folder, loopback only.

    What the caller has set stays, except what would join or disturb another cluster. max_files: that each process may
    open.
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
        # By default a call between deployments carries 4 MiB. A body of that size that is stored needs some more.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2 * MAX_REQUEST_BYTES),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(next(free)),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(next(free)),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(next(free)),
        "RAY_USAGE_STATS_ENABLED": "0",
        # What each worker imports while it waits for work.
        "RAY_preload_python_modules": "deployments.preload",
        # HAProxy's log of requests, to no reader: the ingress logs what matters. By default it opens a UDP port for it.
        "RAY_SERVE_HAPROXY_LOG_TARGET": f"{run_folder}/log.sock",
        # By default 4,096, for which it wants 10,265 files: where it cannot have them, it does not start.
        MAXCONN: str(max_connections(max_files)),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(num_proxy_threads(os.cpu_count() or 1)),
        # By default three connections that fail in turn send all traffic to Serve's own proxy, which has no route to
        # the ingress's workers and answers 500. HAProxy tries a failed connection again, at another ingress if it can;
        # its health checks find an ingress that is dead.
        "RAY_SERVE_HAPROXY_OBSERVE_MARK_DOWN_ENABLED": "0",
        # When ingresses change, a new HAProxy takes over, and the one before ends its streams: by default for 120 s.
        # This is as long as a client may be silent.
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
        # Most of what an idle service computes is its controller looking for changes, by default ten times a second.
        # Streams do not wait for it when a replica dies: the ingress sees that its line broke.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
        # By default Ray's workers step back by 15: beside another process that computes in the same session or
        # container they get 3.4% of a core. Among sessions Linux shares cores first, so it changes nothing there.
        "RAY_worker_niceness": "0",
        # By default Ray measures each call of its timers, for a report in its logs, and all processes of
        # the node every five seconds, for its dashboard. Both are a tenth of what an idle service computes.
        "RAY_event_stats": "0",
        "REPORTER_UPDATE_INTERVAL_MS": "20000",
        # Three of these and Serve kills a proxy that has not started. With its 5 s it gave up on a busy machine what it
        # would have waited a minute for, and the start failed.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "20",
    }
    if config.host in LOOPBACK:
        # Ray names every node by an outside address unless this variable says that the machine can have no cluster.
        defaults["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if _all_models_are_local(config):
        defaults["HF_HUB_OFFLINE"] = "1"
    kept = {name: value for name, value in inherited.items() if name != "RAY_ADDRESS"}
    return defaults | kept | ours


def reserved_cpus(file: ServeFile) -> float:
    """What replicas, ingresses and batches reserve together, autoscaled to the most."""

    def of(config: ApplicationConfig) -> float:
        replicas = sum(model.replicas.max_replicas * model.replicas.reserved_cpus for model in config.models)
        batches = BATCHES_CPUS if config.batches else 0.0
        ingresses = (config.ingress.num_replicas + 1) * INGRESS_CPUS  # the next comes before one goes
        return replicas + ingresses + batches

    return sum(map(of, file.applications.values()))


def num_proxy_threads(num_cores: int) -> int:
    """HAProxy's threads: one carries the streams that an ingress on the other cores can write."""
    max_proxy_threads = 4  # as Serve has it
    return max(1, min(max_proxy_threads, num_cores // 4))


def _all_models_are_local(config: ServeFile) -> bool:
    models = [model for served in config.applications.values() for model in served.models]
    return all(existing_place(path) for model in models for path in model.engine.model_paths.values())


def free_ports() -> Iterator[int]:
    """Ports on which no process listens now, each once.

    From a range where neither the kernel (32768 and up) nor Ray (10002-19999, 30000 and up) takes ports by itself, so
    that none is gone before its owner has started.
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
    """End all processes of a session: first SIGTERM, then SIGKILL."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + END_TIMEOUT_S
        for pid in session_members(session):
            try:
                os.kill(pid, sent)
            except ProcessLookupError:
                continue
        # They are not children of this process, so there is no event to wait for.
        while session_members(session) and time.monotonic() < deadline:
            time.sleep(0.05)


def session_members(session: int) -> list[int]:
    """The live processes of a session, by pid; empty where there is no /proc."""
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
