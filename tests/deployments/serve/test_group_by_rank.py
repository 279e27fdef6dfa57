"""A replica is in the group of its rank, also once Serve gives it another one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID
from ray.serve._private.config import DeploymentConfig
from ray.serve._private.deployment_state import RankManager
from ray.serve._private.replica import UserCallableWrapper
from ray.serve.schema import ReplicaRank

from app.config import SchedulerConfig
from app.errors import InvalidSetup
from app.fleet import Entry
from deployments.serve.transport import OVERRIDE, SchedulerOverride

STEADY, BOLD = {"name": "steady"}, {"name": "bold", "scheduler": {"policy": "sjf", "max_running": 16}}
FEWER = {"scheduler": {"max_waiting": 5}}  # a user_config
SWITCHED = SchedulerOverride(strategy=None, policy=SchedulerConfig.model_validate({"policy": "fair"}).policy)


async def told(replica: Any, rank: int, user_config: object = None) -> None:
    """By Serve's own code, which passes a rank only to a method that takes it."""
    wrapper = UserCallableWrapper(
        type(replica), (), {}, deployment_id=DeploymentID("replica-demo"), run_sync_methods_in_threadpool=False,
        run_user_code_in_separate_thread=False, local_testing_mode=False, deployment_config=DeploymentConfig(),
        actor_id="",
    )  # fmt: skip
    wrapper._callable = replica
    await wrapper.call_reconfigure(user_config, rank=ReplicaRank(rank=rank, node_rank=0, local_rank=rank))


def in_force(replica: Any) -> tuple[str, str, int, int]:
    """The group that ingresses hear of, and what the engine does: policy, max_running, max_requests."""
    stats = replica.stats()
    return replica._frame_server._report().group, stats.policy, stats.max_running, replica._engine.max_requests


def test_after_an_update_that_starts_new_replicas_first_each_group_has_one(make_replica: Callable[..., Any]) -> None:
    async def updated() -> list[str]:
        ranks = RankManager()  # Serve's
        new: dict[str, Any] = {}
        for number in range(2):
            ranks.assign_rank(f"old {number}")
        for number in range(2):
            rank = ranks.assign_rank(f"new {number}")
            new[f"new {number}"] = make_replica(rank, groups=[STEADY, BOLD])
            ranks.release_rank(f"old {number}")
        assert [in_force(each)[0] for each in new.values()] == ["steady"] * 2, "of ranks 2 and 0"
        for name in ranks.check_rank_consistency_and_reassign_minimally([*new]):
            await told(new[name], ranks.get_rank(name))
        return [in_force(each)[0] for each in new.values()]

    assert sorted(asyncio.run(updated())) == ["bold", "steady"]


def test_another_rank_brings_the_settings_of_its_group_and_leaves_what_was_switched(
    make_replica: Callable[..., Any],
) -> None:
    async def main() -> None:
        replica = make_replica(groups=[STEADY, BOLD])
        await told(replica, 0, FEWER)
        assert in_force(replica) == ("steady", "fcfs", 32, 37)
        await told(replica, 1, FEWER)
        assert in_force(replica) == ("bold", "sjf", 16, 21)
        await replica.gossip({OVERRIDE: Entry(1.0, SWITCHED)})
        await told(replica, 1, FEWER)  # Serve's controller has started anew
        assert in_force(replica) == ("bold", "fair", 16, 21)
        await told(replica, 0, FEWER)
        assert in_force(replica) == ("steady", "fair", 32, 37)
        await told(replica, 0)
        assert in_force(replica) == ("steady", "fcfs", 32, 288), "another user_config ends a switch"

    asyncio.run(main())


def test_a_replica_that_cannot_have_the_settings_of_another_group_stays_in_its_own(
    make_replica: Callable[..., Any],
) -> None:
    async def main() -> None:
        replica = make_replica(1, groups=[STEADY, BOLD])
        before = in_force(replica)
        replica._engine._engine._largest_step = SchedulerConfig(max_running=16)  # as on a GPU
        with pytest.raises(InvalidSetup, match=r"max_running: got 32, but this replica's memory was sized for 16"):
            await told(replica, 0)
        await replica.gossip({OVERRIDE: Entry(1.0, SWITCHED)})
        assert in_force(replica) == (before[0], "fair", *before[2:])

    asyncio.run(main())
