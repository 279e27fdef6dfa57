"""The policy that a config names."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from app.errors import InvalidSetup
from app.fleet.dispatch.least_loaded import LeastLoaded
from app.fleet.dispatch.policy import DispatchPolicy
from app.fleet.dispatch.prefix_affinity import PrefixAffinity
from app.fleet.dispatch.round_robin import RoundRobin


def make_policy(choice: str | Mapping[str, Any], rng: random.Random) -> DispatchPolicy:
    """A new policy: by its name, or by the settings of `replicas.dispatch` as plain values, `name` among them.

    Raises:
        InvalidSetup: no policy has that name, or it lacks a setting that it needs.
    """
    settings = {"name": choice} if isinstance(choice, str) else choice
    match settings:
        case {"name": "round_robin"}:
            return RoundRobin()
        case {"name": "least_loaded"}:
            return LeastLoaded(rng)
        case {"name": "prefix_affinity", "max_imbalance_tokens": int(max_imbalance_tokens)}:
            return PrefixAffinity(rng, max_imbalance_tokens=max_imbalance_tokens)
        case {"name": "prefix_affinity"}:
            raise InvalidSetup("replicas.dispatch: prefix_affinity needs max_imbalance_tokens, a number of tokens")
    raise InvalidSetup(
        f"replicas.dispatch: got {settings.get('name')!r}; must be one of round_robin, least_loaded, prefix_affinity"
    )
