"""What ends with a rank: the engine, at once, and all other ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch

from app.config import GIB
from app.engine.async_engine import AsyncEngine
from app.engine.batch import DeviceLost, StepBatch, StepResult
from app.errors import EngineStopped, Failure, InvalidSetup
from app.model.parallel.ranks import Ranks, VisibleCard, check_cards, check_heads
from tests.kit.engine import CountingRunner, build_fake_engine, make_request
from tests.model.parallel.fake_rank import ForkedRank, main
from tests.waiting import eventually, stop_child

STEP_TIMEOUT_S = 4.0
NUM_TOKENS = 3_000  # a second of steps at least


def started(size: int = 2, how: str = "follow", start_timeout_s: float = 60.0) -> Ranks:
    return Ranks(
        size=size, device=torch.device("cpu"), settings={}, start=partial(ForkedRank, partial(main, how)),
        step_timeout_s=STEP_TIMEOUT_S, start_timeout_s=start_timeout_s,
    )  # fmt: skip


def ranks_of(size: int = 2, how: str = "follow") -> Ranks:
    ranks = started(size, how)
    with ranks.loading():
        pass
    return ranks


class ExchangingRunner(CountingRunner):
    """Tokens of CountingRunner; in each step the ranks exchange a number."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(block_size=4)
        self.ranks = ranks

    def run(self, batch: StepBatch) -> StepResult:
        with self.ranks.step(batch):
            self.ranks.group.all_reduce(torch.ones(4))
        return super().run(batch)

    def check(self) -> None:
        self.ranks.check()

    def close(self) -> None:
        self.ranks.close()


@contextmanager
def serving() -> Iterator[tuple[AsyncEngine, int]]:
    """An engine of two ranks, and the other one's process."""
    ranks = ranks_of()
    engine = AsyncEngine(
        build_fake_engine(runner=ExchangingRunner(ranks), num_blocks=4096, max_model_len=4000), max_requests=16
    )
    yield engine, ranks.processes[0].pid
    engine.shutdown()


async def one_stream(engine: AsyncEngine, strike: Callable[[], None] | None) -> int:
    """Returns how many tokens came before the error."""
    num_tokens = 0
    try:
        async for delta in engine.generate(make_request(max_tokens=NUM_TOKENS)):
            num_tokens += len(delta.token_ids)
            if num_tokens == 20 and strike is not None:
                await asyncio.to_thread(strike)
    except EngineStopped:
        return num_tokens
    raise AssertionError("the stream ended as if nothing had happened")


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_streams_end_with_an_error_for_another_replica_when_a_rank_is(how: str) -> None:
    with serving() as (engine, pid):
        strike = (lambda: os.kill(pid, signal.SIGKILL)) if how == "killed" else (lambda: stop_child(pid))

        async def main() -> list[int]:
            streams = [one_stream(engine, strike if n == 0 else None) for n in range(4)]
            return await asyncio.wait_for(asyncio.gather(*streams), timeout=STEP_TIMEOUT_S + 20)

        assert min(asyncio.run(main())) > 0
        with pytest.raises(EngineStopped):
            engine.check_health()
        assert not psutil.pid_exists(pid)


def test_a_rank_that_dies_while_the_engine_is_idle_makes_it_unhealthy() -> None:
    with serving() as (engine, pid):
        engine.check_health()
        os.kill(pid, signal.SIGKILL)

        def is_healthy() -> bool:
            try:
                engine.check_health()
            except EngineStopped:
                return False
            return True

        eventually(is_healthy, lambda healthy: not healthy)


def test_a_step_that_fails_on_one_rank_ends_all() -> None:
    ranks = ranks_of()
    with pytest.raises(DeviceLost, match="a step failed"), ranks.step(StepBatch((), ())):
        raise ValueError("of rank 0")
    assert all(process.poll() is not None for process in ranks.processes)
    with pytest.raises(DeviceLost), ranks.step(StepBatch((), ())):
        raise AssertionError("no step can be computed")
    ranks.close()


def test_the_error_of_a_rank_at_its_start_is_that_of_the_engine() -> None:
    with pytest.raises(InvalidSetup, match="memory of rank 1 is too small"):
        ranks_of(how="refuse")


def test_a_rank_that_ends_at_its_start_is_an_error() -> None:
    with pytest.raises(Failure, match="the ranks cannot start"):
        ranks_of(how="exit")


def test_a_rank_that_does_not_start_is_named() -> None:
    with pytest.raises(Failure, match=r"the start of the ranks has taken more than 0.01 s; rank 1 hangs"):
        started(how="stop-at-start", start_timeout_s=0.01)


@pytest.mark.parametrize("exchanges", [False, True])
def test_a_rank_that_hangs_while_it_loads_is_named(exchanges: bool) -> None:
    """Rank 0 waits for its answer, or in an exchange."""
    ranks = started(how="stop-at-load")
    ranks._start_timeout_s = 0.1
    with pytest.raises(Failure, match=r"loading has taken more than 0.1 s; rank 1 hangs"), ranks.loading():
        _ = ranks.group.minimum(0) if exchanges else None
    assert all(process.poll() is not None for process in ranks.processes)


def test_the_rank_that_hangs_before_the_first_step_is_named_among_those_that_wait() -> None:
    ranks = ranks_of(3, how="stop-last")
    ranks._start_timeout_s = 0.5
    hangs = pytest.raises(Failure, match=r"preparing for the first step has taken more than 0.5 s; rank 2 hangs")
    with hangs, ranks.preparing():
        ranks.group.minimum(0)
    assert all(process.poll() is not None for process in ranks.processes)


def test_a_killed_rank_that_does_not_end_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that hangs in a driver."""
    monkeypatch.setattr("app.model.parallel.ranks.END_TIMEOUT_S", 0.0)
    ranks = ranks_of()
    process, asked = ranks.processes[0], []

    def wait(timeout: float | None = None) -> int:
        assert timeout is not None, "it would wait for ever"
        asked.append(timeout)
        raise subprocess.TimeoutExpired("rank", timeout)

    with monkeypatch.context() as patch:
        patch.setattr(process, "wait", wait)
        ranks.close()
    assert asked == [0.0]
    process.wait()


def test_no_rank_outlives_its_parent_even_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # the folder of the ranks outlives their parent

    def with_ranks(descriptor: int, _parent: int) -> None:
        os.write(descriptor, b"%d" % ranks_of().processes[0].pid)
        time.sleep(60)

    said, says = os.pipe()
    parent = ForkedRank(with_ranks, says)
    os.close(says)
    with os.fdopen(said, "rb", buffering=0) as pipe:
        pid = int(pipe.read(20))
    os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    eventually(lambda: psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE,
               lambda lives: not lives)  # fmt: skip


def test_cards_that_cannot_share_a_model_are_refused_with_the_numbers() -> None:
    one, other = VisibleCard("NVIDIA H200", 141 * GIB), VisibleCard("NVIDIA L4", 22 * GIB)
    check_cards([one, one, other], 2)
    with pytest.raises(InvalidSetup, match="got 4, but this process can use only 2 GPUs"):
        check_cards([one, one], 4)
    with pytest.raises(InvalidSetup, match=r"got 2 for 1 x NVIDIA H200 with 141 GiB and 1 x NVIDIA L4 with 22 GiB"):
        check_cards([one, other], 2)


def test_heads_that_ranks_cannot_share_are_refused_with_the_numbers() -> None:
    check_heads({"num_attention_heads": 12}, 4)
    with pytest.raises(InvalidSetup, match=r"got 5, which does not divide num_attention_heads 12 .* 1, 2, 3, 4, 6, 12"):
        check_heads({"text_config": {"num_attention_heads": 12}}, 5)
