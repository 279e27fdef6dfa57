"""The settings of files, batches and webhooks."""

from __future__ import annotations

import ipaddress

from pydantic import Field, field_validator, model_validator

from app.config.base import GIB, Settings


class WebhooksConfig(Settings):
    """Messages that report the end of a batch."""

    url: str | None = Field(
        None,
        min_length=1,
        max_length=2048,
        description="receiver for batches without a receiver; may be in a private network, over http and on any port",
    )
    secret_file: str | None = Field(
        None, min_length=1, description="file with the secret (`whsec_…`) that signs messages to `url`"
    )
    allowed_networks: tuple[str, ...] = Field(
        (),
        max_length=64,
        description="private networks, such as 10.1.0.0/16, where batches may have receivers, over http and on any"
        " port; every key may then send messages there",
    )

    @field_validator("allowed_networks")
    @classmethod
    def _networks_are_networks(cls, networks: tuple[str, ...]) -> tuple[str, ...]:
        for network in networks:
            try:
                ipaddress.ip_network(network)
            except ValueError as error:
                raise ValueError(f"{error}; give networks like 10.1.0.0/16 or fd00:1::/32") from None
        return networks

    @model_validator(mode="after")
    def _url_and_secret_go_together(self) -> WebhooksConfig:
        if (self.url is None) != (self.secret_file is None):
            raise ValueError("url and secret_file go together: set both or neither")
        return self


class BatchesConfig(Settings):
    """Files and batches over HTTP."""

    path: str = Field(
        "~/.local/share/carousel/batches",
        min_length=1,
        description="folder where files and batches survive restarts; each service needs its own folder",
    )
    max_total_bytes: int = Field(
        20 * GIB, ge=1, le=10**15, description="maximum size of all files and stored responses, in bytes"
    )
    keep_s: int | None = Field(
        30 * 86_400,
        ge=1,
        description="seconds for which responses, and files without an expiry, are stored; null: forever",
    )
    webhooks: WebhooksConfig = WebhooksConfig()
