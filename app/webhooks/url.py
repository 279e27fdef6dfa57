"""URLs that messages may go to, read by one strict rule: no other parser finds another host in them."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from app.config import WebhooksConfig
from app.errors import InvalidRequest
from app.webhooks.addresses import Address, AddressGate

MAX_URL_LENGTH = 2048
_PARAM = "webhook.url"
_DEFAULT_PORTS = {"https": 443, "http": 80}
# No user, no fragment, no backslash, nothing outside ASCII, nothing that is not printed.
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<target>[/?][A-Za-z0-9._~:/?@!$&'()*+,;=%\[\]-]*)?"
)
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookUrl:
    """The parts of a URL that may be asked. `host` has no brackets, `target` is path and query."""

    scheme: str
    host: str
    port: int
    target: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.target}"


def parse_url(url: str, config: WebhooksConfig, gate: AddressGate) -> WebhookUrl:
    """The parts of a URL. Raises InvalidRequest for one that nothing may be sent to, as far as it can be told now.

    A name's addresses are not looked up here: they may be others when a message goes out.
    """
    match = _URL.fullmatch(url) if len(url) <= MAX_URL_LENGTH else None
    if match is None:
        raise _refused(
            f"should be like https://example.com/path, in ASCII, without a user or a fragment, of at most "
            f"{MAX_URL_LENGTH:,} characters"
        )
    scheme, host = match["scheme"], match["host"].strip("[]").lower()
    if scheme == "http" and not config.allow_http:
        raise _refused("should begin with https://")
    port = int(match["port"] or _DEFAULT_PORTS[scheme])
    if port not in config.ports:
        raise _refused(f"has port {port}; this server sends to {', '.join(map(str, config.ports))}")
    address = _address(host)
    if address is not None and not gate.allows(address):
        raise _refused("names an address that is not a public one")
    target = match["target"] or "/"
    return WebhookUrl(scheme=scheme, host=host, port=port, target=target if target[0] == "/" else f"/{target}")


def _address(host: str) -> Address | None:
    """The address that a host is, None for a name. Numbers in any other than the usual form are neither."""
    labels = host.split(".")
    if ":" not in host and not _NUMBER.fullmatch(labels[-1]):
        if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)):
            raise _refused("has a host that is no name")
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        raise _refused("has a host that is neither a name nor an address in its usual form") from None


def _refused(reason: str) -> InvalidRequest:
    # Never with the URL itself: what follows its host may be meant for the receiver only.
    return InvalidRequest(f"{_PARAM} {reason}", param=_PARAM)
