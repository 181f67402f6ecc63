"""Find the network interface that leads to other machines, and its address. Sends nothing."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # netdevice(7): the IPv4 address of an interface
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_GLOBAL_SCOPE = "00"


def source_address(host: str) -> str | None:
    """Return the address from which this machine would send to ``host``."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, 9, type=socket.SOCK_DGRAM
        ):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return probe.getsockname()[0]
    return None


def interface_of(address: str) -> str | None:
    """Return the interface that has this address."""
    for _, name in socket.if_nameindex():
        if address in addresses_of(name):
            return name
    return None


def addresses_of(interface: str) -> list[str]:
    """Return the first IPv4 address, if there is one, and the IPv6 addresses of global scope."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        with contextlib.suppress(OSError):
            request = struct.pack("256s", interface.encode())
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
            found.append(socket.inet_ntoa(answer[20:24]))
    with contextlib.suppress(OSError):
        for line in _IPV6_ADDRESSES.read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if name == interface and scope == _GLOBAL_SCOPE:
                found.append(str(ipaddress.ip_address(int(digits, 16))))
    return found
