"""API keys for tests, and their entries in the file of keys."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from app.api.auth.keys import KeyRing
from app.config import KeysConfig

KEY = "sk-test-Zx81canary"
OTHER_KEY = "sk-test-other"
ADMIN_KEY = "sk-test-admin"


def entry(key: str = KEY, name: str = "alice", **limits: Any) -> dict[str, Any]:
    """What the file has of a key."""
    return {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()} | limits


def ring(entries: Iterable[Mapping[str, Any]]) -> KeyRing:
    """An authenticator that knows the keys of these entries."""
    return KeyRing(KeysConfig.model_validate({"keys": list(entries)}).keys)


def bearer(key: str = KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
