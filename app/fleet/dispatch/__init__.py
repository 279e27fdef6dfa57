"""Chooses a replica for each request, by pure rules over the replicas' known states. Uses no Ray, engine or clock."""

from app.fleet.dispatch.affinity import PrefixChanges, PrefixIndex, Sessions, is_indexed
from app.fleet.dispatch.decision import Candidate, Decision, RequestSize
from app.fleet.dispatch.groups import DECODE, PREFILL, Group, GroupChooser, group_of_rank, groups_of_roles, of_group
from app.fleet.dispatch.ledger import Ledger, ReplicaReport
from app.fleet.dispatch.policies import (
    DispatchPolicy,
    LeastLoaded,
    PrefixAffinity,
    RoundRobin,
    make_policy,
    near_adapter,
)

__all__ = [
    "DECODE",
    "PREFILL",
    "Candidate",
    "Decision",
    "DispatchPolicy",
    "Group",
    "GroupChooser",
    "LeastLoaded",
    "Ledger",
    "PrefixAffinity",
    "PrefixChanges",
    "PrefixIndex",
    "ReplicaReport",
    "RequestSize",
    "RoundRobin",
    "Sessions",
    "group_of_rank",
    "groups_of_roles",
    "is_indexed",
    "make_policy",
    "near_adapter",
    "of_group",
]
