"""The HTTP API: keys, and which machines and pages may use it."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from app.config.base import Name, Settings, repeated


class KeyConfig(Settings):
    """An API key, of which only a hash is known, and what its holder may do."""

    name: Name = Field(description="the tenant of its requests")
    sha256: str = Field(description="hash that `carousel key` prints")
    models: tuple[Name, ...] = Field((), description="models it may use; default: all")
    requests_per_minute: int | None = Field(None, ge=1, le=10**9, description="requests a minute; default: no limit")
    tokens_per_minute: int | None = Field(
        None, ge=1, le=10**12, description="tokens of prompts and outputs a minute; default: no limit"
    )
    tokens_per_day: int | None = Field(
        None, ge=1, le=10**15, description="tokens of prompts and outputs in a day of UTC; default: no limit"
    )
    tokens_per_month: int | None = Field(
        None, ge=1, le=10**15, description="tokens of prompts and outputs in a month of UTC; default: no limit"
    )
    money_per_month: float | None = Field(
        None, gt=0, le=10**12, description="money in a month of UTC, by `models[].prices`; default: no limit"
    )
    max_concurrency: int | None = Field(
        None, ge=1, le=10**6, description="requests at once; default: as many as places are free"
    )
    max_tokens: int | None = Field(None, ge=1, le=10**9, description="output tokens of a choice; default: the model's")
    min_priority: int = Field(
        0, ge=-100, le=0, description="lowest `priority` it may ask for: below 0 it may go before other keys"
    )
    admin: bool = Field(False, description="opens /admin too")

    @property
    def budgets(self) -> dict[str, float]:
        """Those that it has, by their names."""
        names = ("tokens_per_day", "tokens_per_month", "money_per_month")
        return {name: budget for name in names if (budget := getattr(self, name)) is not None}

    @field_validator("sha256")
    @classmethod
    def _is_a_hash(cls, sha256: str) -> str:
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):  # it may be the key itself, which no message should show
            raise ValueError(
                f"sha256 has {len(sha256):,} characters; it should be the 64 hexadecimal digits of the key's hash, as "
                f"`carousel key` prints them"
            )
        return sha256


class ApiConfig(Settings):
    """What may use the HTTP API."""

    keys_file: str | None = Field(
        None,
        min_length=1,
        description="YAML file of API keys, see below; changes are followed; default: requests need no key",
    )
    allow_unauthenticated: bool = Field(
        False,
        description="no keys beyond loopback: any machine that reaches the service may use it",
    )
    metrics_for: Literal["public", "keys", "admins"] = Field(
        "keys",
        description="requests that may read /metrics: those with a key, all, or those with an admin's key",
    )
    allowed_origins: tuple[str, ...] = Field(
        (),
        max_length=64,
        description="origins of web pages that may use the API (CORS), as https://chat.example.com; `*`: all",
    )
    share_prefixes: bool = Field(
        False, description="cached prefixes serve all keys: faster, but times tell one what another has sent"
    )
    store_responses: bool = Field(
        False,
        description="a response (/v1/responses) is stored unless its body has `store: false`, as at OpenAI; needs "
        "`batches`",
    )

    @field_validator("allowed_origins")
    @classmethod
    def _origins_are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in map(str.lower, origins):
            if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
                raise ValueError(
                    f"got {origin!r}; an origin is written as browsers send it: https://chat.example.com or "
                    f"http://localhost:3000, without a path; `*` allows all"
                )
        return tuple(map(str.lower, origins))


class KeysConfig(Settings):
    """The content of the file of API keys."""

    keys: tuple[KeyConfig, ...] = Field(min_length=1, description="at least one, with names and hashes of their own")

    @field_validator("keys")
    @classmethod
    def _keys_are_told_apart(cls, keys: tuple[KeyConfig, ...]) -> tuple[KeyConfig, ...]:
        for what, values in (("name", [key.name for key in keys]), ("sha256", [key.sha256 for key in keys])):
            twice = repeated(values)
            if twice:
                raise ValueError(f"keys have the same {what}: {', '.join(twice)}; give each its own")
        return keys
