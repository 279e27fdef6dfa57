"""Ray's head, with its state in Redis: it may die. A smoke size of row R7, on two hosts of our own."""

from __future__ import annotations

import asyncio
import os
import subprocess
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.chaos.faults import kill
from benchmarks.chaos.head import IN_REDIS, Batch, head_command, redis, why_no_head, with_head
from benchmarks.chaos.networks import own_network
from benchmarks.chaos.stage import application
from benchmarks.chaos.traffic import mixed, with_reference
from tests.deployments.strikes import assert_nothing_is_wrong, has_begun
from tests.waiting import PATIENCE_S, until

REASON = why_no_head()
NUM_ROWS = 30  # two at a time, so that they take 18 s
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.serve]


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables of this session's."""
    for name in [name for name in os.environ if name.startswith("RAY_")]:
        monkeypatch.delenv(name)
    # Ray gives a raylet up at the fifth failure in a row: by default it asks first after 5 s, then every 3 s. An answer
    # may take as long as before.
    for name in ("initial_delay", "period"):
        monkeypatch.setenv(f"RAY_health_check_{name}_ms", "500")


def test_a_head_with_redis_may_die_with_a_replica_and_the_next_one_replaces_it(tmp_path: Path) -> None:
    settings = application(num_replicas=2, batches={"path": str(tmp_path / "batches")})
    with with_head(settings) as (running, head):
        asyncio.run(running.is_whole())
        traffic = replace(asyncio.run(with_reference(running.target, mixed(16, max_tokens=(20, 60)))), answers=[])
        batch = Batch.begin(running.target, num_rows=NUM_ROWS)

        async def main() -> None:
            under_way = asyncio.ensure_future(traffic.once())
            await has_begun(traffic)
            start_again = head.lost()
            kill(running.replicas()[:1])
            await under_way
            await traffic.once()
            assert len(running.replicas()) == 1, "no head, no replacement"
            start_again()
            await until(running.replicas, lambda replicas: len(replicas) == 2)
            await running.is_whole()
            await traffic.once()

        asyncio.run(main())
        assert_nothing_is_wrong(traffic)
        counts = asyncio.run(batch.counts())
        assert counts == {"rows": NUM_ROWS, "completed": NUM_ROWS, "lost": 0, "repeated": 0, "different": 0}


@pytest.mark.parametrize(
    ("wanted", "given", "said"),
    [
        (None, "right", "Could not establish connection to Redis"),
        ("right", "", "Failed to get Redis cluster info"),
        ("right", "wrong", "WRONGPASS invalid username-password pair"),
    ],
    ids=["not-there", "without-password", "wrong-password"],
)
def test_a_head_that_may_not_use_its_redis_says_why_and_ends(
    wanted: str | None, given: str, said: str, tmp_path: Path
) -> None:
    with ExitStack() as block:
        block.enter_context(own_network())
        variables = os.environ | IN_REDIS
        if wanted is not None:
            block.enter_context(redis(wanted, str(tmp_path)))
        else:
            variables["RAY_redis_db_connect_retries"] = "1"
        command = [*head_command(given), "--temp-dir", str(tmp_path / "ray")]
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 1
    assert said in done.stderr
