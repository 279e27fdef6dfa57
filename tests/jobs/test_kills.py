"""`kill -9` of the process at any moment: what a real crash leaves behind."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from app.batches import PageOf
from tests.jobs.killed_process import MAX_IN_FLIGHT
from tests.kit.jobs import OWNER, Echo, ends, service_in
from tests.waiting import PATIENCE_S

PROJECT = Path(__file__).parents[2]
NUM_LINES = 400
NUM_KILLS = 3
# Where the killing process is slow: so many lines a life, then it hangs and waits for its end.
MOST_LINES = NUM_LINES // NUM_KILLS - 10


def go_on(folder: Path, log: Path, *, most: int = NUM_LINES) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.jobs.killed_process", str(folder), str(log), str(NUM_LINES), str(most)]
    return subprocess.Popen(command, cwd=PROJECT)


def kill_after(folder: Path, log: Path, num_lines: int, pause_s: float) -> None:
    """Let a process go on until so many more lines were answered, and a moment longer, and kill it at work."""
    wanted = log.stat().st_size + num_lines
    process = go_on(folder, log, most=MOST_LINES)
    try:
        while log.stat().st_size < wanted:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.002)
        time.sleep(pause_s)
        assert process.poll() is None, "it ended before it could be killed"
    finally:
        process.kill()
        process.wait()


async def outcome(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    async with service_in(folder, Echo()) as service:
        [batch] = (await service.batches(PageOf(owner=OWNER, limit=10)))["data"]
        assert batch["status"] == "completed"
        return await ends(service, batch)


def test_every_line_ends_once_though_the_process_is_killed_again_and_again(tmp_path: Path) -> None:
    choose = random.Random(6)
    folder, log = tmp_path / "batches", tmp_path / "log"
    log.touch()
    for _ in range(NUM_KILLS):
        kill_after(folder, log, choose.randrange(NUM_LINES // NUM_KILLS - 50), choose.random() * 0.01)
    assert go_on(folder, log).wait(timeout=PATIENCE_S) == 0
    output, errors = asyncio.run(outcome(folder))
    assert (output.keys(), errors) == ({f"line-{n}" for n in range(NUM_LINES)}, {})
    num_answers = log.stat().st_size
    assert num_answers <= NUM_LINES + NUM_KILLS * MAX_IN_FLIGHT, "only lines in flight run again"


def test_a_process_that_was_stopped_past_its_lock_and_goes_on_changes_nothing(tmp_path: Path) -> None:
    """As on storage of several machines, which gives away the locks of a machine that it does not hear from."""
    folder, log = tmp_path / "batches", tmp_path / "log"
    log.touch()
    stopped = go_on(folder, log, most=NUM_LINES // 3)  # it does not end before it is stopped
    try:
        while log.stat().st_size < NUM_LINES // 4:
            assert stopped.poll() is None, "it ended before it could be stopped"
            time.sleep(0.002)
        stopped.send_signal(signal.SIGSTOP)
        (folder / "lock").unlink()
        next_one = go_on(folder, log)
        while log.stat().st_size < NUM_LINES // 2:
            assert next_one.poll() is None, "it ended before the first went on"
            time.sleep(0.002)
        stopped.send_signal(signal.SIGCONT)
        assert next_one.wait(timeout=PATIENCE_S) == 0
    finally:
        stopped.kill()
        stopped.wait()
    output, errors = asyncio.run(outcome(folder))
    assert (output.keys(), errors) == ({f"line-{n}" for n in range(NUM_LINES)}, {})
