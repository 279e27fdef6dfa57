"""The replica registries of this process, by deployment: where Serve's router finds what the fleet knows.

Serve pickles the router's module by value, so nothing in it is shared; what it imports while it runs is.
"""

from __future__ import annotations

from app.fleet import ReplicaRegistry

_registries: dict[str, ReplicaRegistry] = {}


def register(deployment: str, registry: ReplicaRegistry) -> None:
    """Have the router of this deployment route by this registry. The handle must not have been used yet."""
    _registries[deployment] = registry


def registry_of(deployment: str) -> ReplicaRegistry | None:
    """The registry of a deployment; None where no fleet has registered one: any order will do there."""
    return _registries.get(deployment)
