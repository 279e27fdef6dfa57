"""API keys for tests, and their entries in a config."""

from __future__ import annotations

import hashlib
from typing import Any

KEY = "sk-test-Zx81canary"
OTHER_KEY = "sk-test-other"
ADMIN_KEY = "sk-test-admin"


def entry(key: str = KEY, name: str = "alice", **limits: Any) -> dict[str, Any]:
    """What a config has of a key."""
    return {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()} | limits


def bearer(key: str = KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}
