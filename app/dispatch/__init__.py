"""Which replica a request goes to: pure rules over what is known of each replica. No Ray, no engine, no clock."""

from app.dispatch.decision import Candidate, Decision
from app.dispatch.groups import Group, GroupChooser, group_of_rank, of_group
from app.dispatch.least_loaded import LeastLoaded
from app.dispatch.ledger import Ledger, ReplicaReport
from app.dispatch.lengths import OutputLengths
from app.dispatch.load import ReplicaLoad, RequestSize
from app.dispatch.named import make_policy
from app.dispatch.policy import DispatchPolicy
from app.dispatch.prefix_affinity import PrefixAffinity
from app.dispatch.prefix_index import PrefixIndex
from app.dispatch.round_robin import RoundRobin
from app.dispatch.sessions import Sessions

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
