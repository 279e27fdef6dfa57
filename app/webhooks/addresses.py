"""Decides which URLs and addresses may receive messages: public ones over https, and networks that the settings allow.

A strict pattern parses URLs, so that no other parser can find a different host in them. The address of a host name is
checked when the socket is created, because the name may resolve to different addresses at different times.
"""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from app.errors import InvalidRequest

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

PUBLIC_PORTS = (443, 8443)  # for public receivers, only ports of https, so that messages cannot reach other services
MAX_URL_LENGTH = 2048

# Networks that IANA's special-purpose IPv4 registry lists as not globally reachable, multicast and reserved networks,
# and the address of Azure's platform services.
_SPECIAL_IPV4 = tuple(
    map(
        ipaddress.IPv4Network,
        "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 "
        "192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/3 "
        "168.63.129.16/32".split(),
    )
)
# Public IPv6 addresses are in the global unicast space, except protocol assignments (such as Teredo and ORCHID),
# documentation and 6to4. Addresses that contain an IPv4 address (mapped, translated or tunnelled) are not public.
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_IPV6 = tuple(map(ipaddress.IPv6Network, "2001::/23 2001:db8::/32 2002::/16 3fff::/20".split()))

# A URL contains only printable ASCII characters, and no user, fragment or backslash.
_URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::(?P<port>[0-9]{1,5}))?"
    r"(?P<target>[/?][A-Za-z0-9._~:/?@!$&'()*+,;=%\[\]-]*)?"
)
_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_NUMBER = re.compile(r"[0-9]+|0[xX][0-9A-Fa-f]*")


class ForbiddenAddress(OSError):
    """Raised for an address to which messages must not be sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookUrl:
    """The parts of a URL. `host` is stored without brackets; `target` is the path and the query."""

    scheme: str
    host: str
    port: int
    target: str

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}{self.target}"

    @property
    def may_be_public(self) -> bool:
        """Whether a receiver at a public address may use this URL."""
        return self.scheme == "https" and self.port in PUBLIC_PORTS


class AddressPolicy:
    """Allows messages to public addresses over https, and to allowed networks over http or https."""

    def __init__(self, allowed_networks: Iterable[str], *, is_operators: bool = False) -> None:
        """`allowed_networks`, such as `10.0.0.0/8`, are allowed in addition to public addresses.

        `is_operators` means that the receiver comes from the settings instead of a request. The operator is trusted, so
        all addresses that are not public are also allowed.
        """
        self._allowed: tuple[Network, ...] = tuple(map(ipaddress.ip_network, allowed_networks))
        self._is_operators = is_operators

    def check(self, url: WebhookUrl, address: Address | None) -> None:
        """Raise InvalidRequest if messages to a URL are certainly forbidden.

        `address` is None if the URL contains a host name, whose addresses may change before a message is sent.
        """
        if (self._allowed or self._is_operators) and (address is None or self._is_in_allowed_network(address)):
            return
        if url.scheme != "https":
            raise _refused("must begin with https://")
        if url.port not in PUBLIC_PORTS:
            raise _refused(f"has port {url.port}; use one of {', '.join(map(str, PUBLIC_PORTS))}")
        if address is not None and not is_public(address):
            raise _refused("contains an address that is not public; use a public address")

    def open_socket(self, url: WebhookUrl, address_info: tuple[Any, ...]) -> socket.socket:
        """Open a socket for one of the URL's `getaddrinfo` entries. Raises ForbiddenAddress if it is not allowed."""
        family, kind, protocol, _, name = address_info
        address = ipaddress.ip_address(name[0].partition("%")[0])
        if not (url.may_be_public and is_public(address)) and not self._is_in_allowed_network(address):
            raise ForbiddenAddress(errno.EACCES, "the address is not public")
        return socket.socket(family, kind, protocol)

    def _is_in_allowed_network(self, address: Address) -> bool:
        if self._is_operators and not is_public(address):
            return True
        return any(address in network for network in self._allowed)


def is_public(address: Address) -> bool:
    """Return whether an address belongs to a single machine and is reachable from the whole internet."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _SPECIAL_IPV4)
    return address in _GLOBAL_IPV6 and not any(address in network for network in _SPECIAL_IPV6)


def parse_url(url: str, gate: AddressPolicy) -> WebhookUrl:
    """Return the parts of a URL. Raises InvalidRequest if the URL is malformed or certainly forbidden."""
    match = _URL.fullmatch(url) if len(url) <= MAX_URL_LENGTH else None
    if match is None:
        raise _refused(
            f"must be a URL like https://example.com/path, in ASCII, without a user or fragment, and with at most "
            f"{MAX_URL_LENGTH:,} characters"
        )
    scheme, host, target = match["scheme"], match["host"].strip("[]").lower(), match["target"] or "/"
    parsed = WebhookUrl(
        scheme=scheme,
        host=host,
        port=int(match["port"] or {"https": 443, "http": 80}[scheme]),
        target=target if target[0] == "/" else f"/{target}",
    )
    if not 0 < parsed.port < 65536:
        raise _refused(f"has port {parsed.port}; ports are from 1 to 65,535")
    gate.check(parsed, _address(host))
    return parsed


def _address(host: str) -> Address | None:
    """Return a host's address, or None for a host name. Raises InvalidRequest if it is neither, such as `0x7f.1`."""
    labels = host.split(".")
    if ":" not in host and not _NUMBER.fullmatch(labels[-1]):
        if len(host) > 253 or not all(map(_LABEL.fullmatch, labels)):
            raise _refused("has an invalid host name")
        return None
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        raise _refused("has a host that is neither a name nor an address in standard notation") from None


def _refused(reason: str) -> InvalidRequest:
    param = "webhook.url"
    # The message never quotes the URL, because the part after the host may be secret.
    return InvalidRequest(f"{param} {reason}", param=param)
