"""Which replica a request goes to: pure rules over what is known of each replica. No Ray, no engine, no clock."""

from app.fleet.dispatch.decision import Candidate, Decision
from app.fleet.dispatch.groups import Group, GroupChooser, group_of_rank, of_group
from app.fleet.dispatch.least_loaded import LeastLoaded
from app.fleet.dispatch.ledger import Ledger, ReplicaReport
from app.fleet.dispatch.lengths import OutputLengths
from app.fleet.dispatch.load import ReplicaLoad, RequestSize
from app.fleet.dispatch.named import make_policy
from app.fleet.dispatch.policy import DispatchPolicy
from app.fleet.dispatch.prefix_affinity import PrefixAffinity
from app.fleet.dispatch.prefix_index import PrefixIndex
from app.fleet.dispatch.round_robin import RoundRobin
from app.fleet.dispatch.sessions import Sessions

__all__ = [
    "Candidate",
    "Decision",
    "DispatchPolicy",
    "Group",
    "GroupChooser",
    "LeastLoaded",
    "Ledger",
    "OutputLengths",
    "PrefixAffinity",
    "PrefixIndex",
    "ReplicaLoad",
    "ReplicaReport",
    "RequestSize",
    "RoundRobin",
    "Sessions",
    "group_of_rank",
    "make_policy",
    "of_group",
]
