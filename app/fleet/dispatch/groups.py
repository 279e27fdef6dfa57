"""Assigns requests and replicas to groups. A group is one arm of an A/B trial, or a role."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate

from app.errors import InvalidRequest
from app.fleet.dispatch.decision import Candidate

# The groups of a model that sets `replicas.prefill_replicas`.
PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True, slots=True)
class Group:
    """One arm of an A/B trial, or a role. Shares are relative weights with an arbitrary sum."""

    name: str
    share: float
    preset: str = ""  # name of the preset that the group's replicas use


class GroupChooser:
    """Chooses a request's group: the group that it names, or one by share from its preset's groups or all groups."""

    def __init__(self, groups: Sequence[Group]) -> None:
        self._names = [group.name for group in groups]
        self._all = _Shares(groups)
        self._of_preset = {
            preset: _Shares([group for group in groups if group.preset == preset])
            for preset in dict.fromkeys(group.preset for group in groups if group.preset)
        }

    def choose(self, key: str, *, asked: str = "", preset: str = "") -> str:
        """Return the group for `key`, a session or request id; "" if there are no groups.

        The result depends only on the key and the groups, so a session has the same group on every ingress and after a
        restart. `asked` is the group that the request names, and takes precedence over its `preset`.

        Raises InvalidRequest, with the parameter `group` or `preset`, if no group has this name or preset.
        """
        if asked:
            _check(asked, self._names, param="group")
            return asked
        if preset:
            _check(preset, self._of_preset, param="preset", what="with the preset ")
        shares = self._of_preset[preset] if preset else self._all
        return shares.choose(key) if self._names else ""


class _Shares:
    """Divides keys among groups in proportion to their shares."""

    def __init__(self, groups: Sequence[Group]) -> None:
        total = sum(group.share for group in groups)
        self._upper_ends = [end / total for end in accumulate(group.share for group in groups)]
        self._names = [group.name for group in groups]

    def choose(self, key: str) -> str:
        """Return the name of a key's group. There must be at least one group."""
        place = int.from_bytes(blake2b(key.encode(), digest_size=8).digest()) / 2**64
        return next(
            (name for name, end in zip(self._names, self._upper_ends, strict=True) if place < end), self._names[-1]
        )


def _check(asked: str, names: Collection[str], *, param: str, what: str = "") -> None:
    if asked not in names:
        there_are = f"send one of {', '.join(names)}" if names else "this model has no groups"
        raise InvalidRequest(f"there is no group {what}{asked!r}; {there_are}", param=param)


def groups_of_roles(*, prefill: int, decode: int) -> list[Group]:
    """Return the groups of the two roles. The arguments are their shares."""
    return [Group(PREFILL, prefill), Group(DECODE, decode)]


def group_of_rank(rank: int, groups: Sequence[Group]) -> str:
    """Return the group of the replica with this rank (0, 1, 2, …); "" if there are no groups.

    The first ranks are assigned to one group each, so that every group has a replica. Each later rank is assigned to
    the group that is furthest behind its share (Sainte-Laguë method). A replica keeps its group when others join.
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
    """Return the replicas of a group, or all replicas if the group is "" or has no replicas."""
    members = [each for each in candidates if each.group == group] if group else []
    return members or list(candidates)
