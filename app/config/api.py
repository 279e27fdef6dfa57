"""The settings of the HTTP API: API keys, and the machines and web pages that may use the API."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from app.config.base import Name, Settings, repeated


class KeyConfig(Settings):
    """The hash of an API key, and the permissions and limits of its holder."""

    name: Name = Field(description="tenant to which the key's requests belong")
    sha256: str = Field(description="hash that `carousel key` prints")
    models: tuple[Name, ...] = Field((), description="models that the key may use; default: all")
    requests_per_minute: int | None = Field(None, ge=1, le=10**9, description="requests per minute; default: no limit")
    tokens_per_minute: int | None = Field(
        None, ge=1, le=10**12, description="maximum tokens of prompts and outputs per minute; default: no limit"
    )
    tokens_per_day: int | None = Field(
        None, ge=1, le=10**15, description="maximum tokens of prompts and outputs per UTC day; default: no limit"
    )
    tokens_per_month: int | None = Field(
        None, ge=1, le=10**15, description="maximum tokens of prompts and outputs per UTC month; default: no limit"
    )
    money_per_month: float | None = Field(
        None, gt=0, le=10**12, description="maximum cost per UTC month, by `models[].prices`; default: no limit"
    )
    max_concurrency: int | None = Field(
        None, ge=1, le=10**6, description="maximum number of requests at once; default: limited by free slots only"
    )
    max_tokens: int | None = Field(None, ge=1, le=10**9, description="output tokens per choice; default: model's limit")
    min_priority: int = Field(
        0, ge=-100, le=0, description="lowest `priority` of requests; below 0, they may go before other keys' requests"
    )
    admin: bool = Field(False, description="whether the key may also use /admin")

    @property
    def budgets(self) -> dict[str, float]:
        """The budgets that are set, by setting."""
        names = ("tokens_per_day", "tokens_per_month", "money_per_month")
        return {name: budget for name in names if (budget := getattr(self, name)) is not None}

    @field_validator("sha256")
    @classmethod
    def _is_a_hash(cls, sha256: str) -> str:
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):  # the value may be the key itself, so no message shows it
            raise ValueError(
                f"sha256 has {len(sha256):,} characters; it should be the 64 hexadecimal digits of the key's hash, as "
                f"`carousel key` prints them"
            )
        return sha256


class ApiConfig(Settings):
    """Keys, web pages and storage of the HTTP API."""

    keys_file: str | None = Field(
        None,
        min_length=1,
        description="YAML file of API keys (see below), read again when it changes; default: requests need no key",
    )
    allow_unauthenticated: bool = Field(
        False,
        description="serve other machines than loopback without keys: any machine that reaches the service may use it",
    )
    metrics_for: Literal["public", "keys", "admins"] = Field(
        "keys",
        description="who may read /metrics. keys: requests with a key; public: all; admins: requests with an admin key",
    )
    allowed_origins: tuple[str, ...] = Field(
        (),
        max_length=64,
        description="origins of web pages that may use the API (CORS), such as https://chat.example.com; `*`: all",
    )
    share_prefixes: bool = Field(
        False, description="share cached prefixes among keys: faster, but latencies can reveal another key's prompts"
    )
    store_responses: bool = Field(
        False,
        description="store a response (/v1/responses) unless its body has `store: false`, as OpenAI does; needs "
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

    keys: tuple[KeyConfig, ...] = Field(min_length=1, description="at least one key; names and hashes are unique")

    @field_validator("keys")
    @classmethod
    def _keys_are_told_apart(cls, keys: tuple[KeyConfig, ...]) -> tuple[KeyConfig, ...]:
        for what, values in (("name", [key.name for key in keys]), ("sha256", [key.sha256 for key in keys])):
            twice = repeated(values)
            if twice:
                raise ValueError(f"keys have the same {what}: {', '.join(twice)}; give each its own")
        return keys
