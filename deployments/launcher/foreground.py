"""The launcher's child process. Starts a Ray cluster and deploys the config on it.

Must be started by `deployments.launcher.supervisor`, which sets the environment that Ray and Serve require.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path

import ray

from app.child_process import die_with
from app.errors import InvalidSetup
from deployments.launcher.own_cluster import ray_processes, start_own_cluster
from deployments.launcher.terminal import StatusLines


def main() -> int:
    """Start Ray, deploy the config and report changes until a signal arrives. Returns 1 if an application cannot start.

    The process kills itself if Ray's head or raylet ends. The launcher then restarts it.
    """
    given = _arguments()
    _end_with_the_launcher(given.launcher)
    print(f"Starting Ray and Serve for {given.config}; logs in {given.run_folder}/session_latest/logs", flush=True)
    lines = StatusLines()
    # Serve is imported while Ray's processes are starting.
    threading.Thread(target=import_module, args=("deployments.launcher.rollout",), daemon=True).start()
    try:
        start_own_cluster(
            reserved_cpus=given.reserved_cpus,
            namespace="serve",
            include_dashboard=given.dashboard,
            _temp_dir=given.run_folder,
        )
        _end_on_signals()
        _end_with_ray()
        from deployments.launcher.rollout import roll_out

        roll_out(given.config, lines)
    except InvalidSetup as error:
        print(f"The service did not start.\n{error}", flush=True)
        return 1
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ray.shutdown()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m deployments.launcher.foreground")
    parser.add_argument("launcher", type=int, help="process id of the launcher")
    parser.add_argument("config", type=Path)
    parser.add_argument("run_folder")
    parser.add_argument("reserved_cpus", type=float)
    parser.add_argument("--dashboard", action="store_true")
    return parser.parse_args()


def _end_with_the_launcher(launcher: int) -> None:
    """Exit cleanly on a signal, and make the kernel send SIGTERM if the launcher dies."""
    _end_on_signals()
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    die_with(launcher, signal.SIGTERM)


def _end_on_signals() -> None:
    """Exit on a stop signal. Must be called again after `ray.init`, which installs a handler that prints a stack."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))


def _end_with_ray() -> None:
    """Kill this process if Ray's head or raylet ends. Ray restarts neither, and even a shutdown of Ray may hang."""
    processes = ray_processes()

    def look(*_: object) -> None:
        for name, process in processes.items():
            code = process.poll()
            if code is not None:
                how = f"signal {-code}" if code < 0 else f"status {code}"
                os.write(sys.stdout.fileno(), f"{name} has ended with {how}.\n".encode())  # print may be interrupted
                signal.raise_signal(signal.SIGKILL)

    signal.signal(signal.SIGCHLD, look)
    look()


if __name__ == "__main__":
    sys.exit(main())
