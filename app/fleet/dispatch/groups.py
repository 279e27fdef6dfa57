"""A/B trials: which group a request belongs to, and which replicas are that group's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate

from app.errors import InvalidRequest
from app.fleet.dispatch.decision import Candidate


@dataclass(frozen=True, slots=True)
class Group:
    """One arm of a trial. Shares are weights: they need not add up to anything."""

    name: str
    share: float


class GroupChooser:
    """The group of each request: the one that it names, or by share."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._names = [group.name for group in groups]
        total = sum(group.share for group in groups)
        self._upper_ends = [end / total for end in accumulate(group.share for group in groups)]

    def choose(self, key: str, *, asked: str = "", param: str | None = None) -> str:
        """The group for `key`, a session or request id; "" when there are no groups.

        A function of the key and the groups alone: a session stays in its group, on every ingress and after a restart.
        `asked`: the group that the caller names, in the header or field `param`.

        Raises:
            InvalidRequest: the caller names a group that there is not.
        """
        if asked and asked not in self._names:
            groups = f"there are {', '.join(self._names)}" if self._names else "this model has no groups"
            raise InvalidRequest(f"there is no group {asked!r}; {groups}", param=param)
        if asked or not self._names:
            return asked
        place = int.from_bytes(blake2b(key.encode(), digest_size=8).digest()) / 2**64
        return next(
            (name for name, end in zip(self._names, self._upper_ends, strict=True) if place < end), self._names[-1]
        )


def group_of_rank(rank: int, groups: Sequence[Group]) -> str:
    """The group of the replica with this rank (0, 1, 2, …); "" when there are no groups.

    The first ranks go to the groups in turn, so that each has a replica. Every later one goes to the group that is the
    furthest behind its share (Sainte-Laguë's method). A replica keeps its group when others join.
    """
    if not groups:
        return ""
    counts = [1] * len(groups)
    chosen = min(rank, len(groups) - 1)
    for _ in range(len(groups), rank + 1):
        chosen = max(range(len(groups)), key=lambda index: groups[index].share / (2 * counts[index] + 1))
        counts[chosen] += 1
    return groups[chosen].name


def of_group(candidates: Sequence[Candidate], group: str) -> list[Candidate]:
    """The replicas of a group; all replicas when it has none, and for the group ""."""
    members = [each for each in candidates if each.group == group] if group else []
    return members or list(candidates)
