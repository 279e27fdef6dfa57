"""The settings of the HTTP API: API keys, and the machines and web pages that may use the API."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from app.config.base import Name, Settings, repeated


class KeyConfig(Settings):
    """The hash of an API key, and the permissions and limits of its holder."""

    name: Name = Field(description="tenant to which the key's requests belong")
    sha256: str = Field(description="hash of the key, as printed by `carousel key`")
    models: tuple[Name, ...] = Field((), description="models that the key may use; default: all")
    requests_per_minute: int | None = Field(None, ge=1, le=10**9, description="requests per minute; default: no limit")
    tokens_per_minute: int | None = Field(
        None, ge=1, le=10**12, description="maximum prompt and output tokens per minute; default: no limit"
    )
    tokens_per_day: int | None = Field(
        None, ge=1, le=10**15, description="maximum prompt and output tokens per UTC day; default: no limit"
    )
    tokens_per_month: int | None = Field(
        None, ge=1, le=10**15, description="maximum prompt and output tokens per UTC month; default: no limit"
    )
    money_per_month: float | None = Field(
        None, gt=0, le=10**12, description="maximum cost per UTC month, at `models[].prices`; default: no limit"
    )
    max_concurrency: int | None = Field(
        None, ge=1, le=10**6, description="maximum number of concurrent requests; default: limited only by free slots"
    )
    max_tokens: int | None = Field(None, ge=1, le=10**9, description="output tokens per choice; default: model's limit")
    min_priority: int = Field(
        0, ge=-100, le=0, description="lowest `priority` of requests; below 0, they may overtake other keys' requests"
    )
    admin: bool = Field(False, description="whether the key may also use /admin")

    @property
    def budgets(self) -> dict[str, float]:
        """The configured budgets, by the setting's name."""
        names = ("tokens_per_day", "tokens_per_month", "money_per_month")
        return {name: budget for name in names if (budget := getattr(self, name)) is not None}

    @field_validator("sha256")
    @classmethod
    def _is_a_hash(cls, sha256: str) -> str:
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):  # do not show the value, which may be the key itself
            raise ValueError(
                f"sha256 has {len(sha256):,} characters; it must be the key's hash in 64 lowercase hexadecimal digits, "
                f"as printed by `carousel key`"
            )
        return sha256


class ApiConfig(Settings):
    """Keys, web pages and storage of the HTTP API."""

    keys_file: str | None = Field(
        None,
        min_length=1,
        description="YAML file of API keys (see below), reloaded when it changes; default: requests need no key",
    )
    allow_unauthenticated: bool = Field(
        False,
        description="accept requests from other machines without keys; anyone who can reach the service may use it",
    )
    metrics_for: Literal["public", "keys", "admins"] = Field(
        "keys",
        description="who may read /metrics. keys: anyone with a key; admins: anyone with an admin key; public: anyone",
    )
    allowed_origins: tuple[str, ...] = Field(
        (),
        max_length=64,
        description="origins of web pages that may use the API (CORS), such as https://chat.example.com; `*` means all",
    )
    share_prefixes: bool = Field(
        False, description="share cached prefixes among keys; faster, but latencies can reveal other keys' prompts"
    )
    store_responses: bool = Field(
        False,
        description="store responses (/v1/responses) unless the request has `store: false`, as OpenAI does; requires "
        "`batches`",
    )

    @field_validator("allowed_origins")
    @classmethod
    def _origins_are_origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in map(str.lower, origins):
            if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/?#\s]+", origin):
                raise ValueError(
                    f"got {origin!r}; write an origin as browsers send it, without a path, such as "
                    f"https://chat.example.com or http://localhost:3000; `*` allows all"
                )
        return tuple(map(str.lower, origins))


class KeysConfig(Settings):
    """The content of the file of API keys."""

    keys: tuple[KeyConfig, ...] = Field(min_length=1, description="at least one key; names and hashes must be unique")

    @field_validator("keys")
    @classmethod
    def _keys_are_told_apart(cls, keys: tuple[KeyConfig, ...]) -> tuple[KeyConfig, ...]:
        for what, values in (("name", [key.name for key in keys]), ("sha256", [key.sha256 for key in keys])):
            twice = repeated(values)
            if twice:
                raise ValueError(f"several keys have the same {what}: {', '.join(twice)}; give each key its own")
        return keys
