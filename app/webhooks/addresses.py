"""Which addresses a message may go to: those that everybody on the internet can reach, and networks that are named."""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Iterable
from typing import Any

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# IANA's special-purpose IPv4 registry without what is globally reachable; multicast; what was reserved; the address
# under which Azure answers its own machines.
_SPECIAL_IPV4 = tuple(
    map(
        ipaddress.IPv4Network,
        "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24 "
        "192.88.99.0/24 192.168.0.0/16 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 224.0.0.0/3 "
        "168.63.129.16/32".split(),
    )
)
# Of IPv6 only the global unicast space, without protocol assignments (Teredo and ORCHID among them), documentation and
# 6to4. So no address that has an IPv4 address inside is public: neither mapped, nor translated, nor tunnelled.
_GLOBAL_IPV6 = ipaddress.IPv6Network("2000::/3")
_SPECIAL_IPV6 = tuple(map(ipaddress.IPv6Network, "2001::/23 2001:db8::/32 2002::/16 3fff::/20".split()))


class ForbiddenAddress(OSError):
    """Nothing is sent there."""


class AddressGate:
    """Stands where sockets are made: whatever a name was believed to mean, none is connected to another address."""

    def __init__(self, allowed_networks: Iterable[str]) -> None:
        """`allowed_networks` are those beside the public addresses, as `10.0.0.0/8`."""
        self._allowed: tuple[Network, ...] = tuple(map(ipaddress.ip_network, allowed_networks))

    def allows(self, address: Address) -> bool:
        """Whether a message may go there."""
        return is_public(address) or any(address in network for network in self._allowed)

    def open_socket(self, address_info: tuple[Any, ...]) -> socket.socket:
        """A socket for this entry of `getaddrinfo`. Raises ForbiddenAddress."""
        family, kind, protocol, _, address = address_info
        if not self.allows(ipaddress.ip_address(address[0].partition("%")[0])):
            raise ForbiddenAddress(errno.EACCES, "the address is not a public one")
        return socket.socket(family, kind, protocol)


def is_public(address: Address) -> bool:
    """Whether it is an address of one machine that everybody can reach."""
    if isinstance(address, ipaddress.IPv4Address):
        return not any(address in network for network in _SPECIAL_IPV4)
    return address in _GLOBAL_IPV6 and not any(address in network for network in _SPECIAL_IPV6)
