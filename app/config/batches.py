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
        description="receiver for batches that name none; may be in a private network, use http, and have any port",
    )
    secret_file: str | None = Field(
        None, min_length=1, description="file with the secret (`whsec_…`) for signing messages to `url`"
    )
    allowed_networks: tuple[str, ...] = Field(
        (),
        max_length=64,
        description="private networks, such as 10.1.0.0/16, in which batches may have receivers, over http and on any "
        "port; all keys can then send messages to these networks",
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
            raise ValueError("`url` and secret_file require each other; set both or neither")
        return self


class BatchesConfig(Settings):
    """Files and batches over HTTP."""

    path: str = Field(
        "~/.local/share/carousel/batches",
        min_length=1,
        description="folder that stores files and batches across restarts; each service needs its own folder",
    )
    max_total_bytes: int = Field(
        20 * GIB, ge=1, le=10**15, description="maximum total bytes of files, batch results and stored responses"
    )
    keep_s: int | None = Field(
        30 * 86_400,
        ge=1,
        description="seconds until responses, and files without an expiry of their own, are deleted; null: never",
    )
    webhooks: WebhooksConfig = WebhooksConfig()
