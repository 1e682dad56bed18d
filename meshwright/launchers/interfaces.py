"""The network interface that has an address, as gloo and NCCL want it named."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from meshwright.errors import LaunchError

SIOCGIFADDR = 0x8915  # linux/sockios.h
OF_IPV6 = Path("/proc/net/if_inet6")


def resolve(host: str, port: int, variable: str) -> list[tuple[int, str]]:
    """The families and addresses of a host. `variable`: what names it. Raises LaunchError for one that is unknown."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = "a name that resolves on every node (DNS, /etc/hosts), or an address"
        raise LaunchError(f"the host {host} is unknown", why=f"{variable}: {why}", hint=hint) from None
    return [(family, str(address[0])) for family, _, _, _, address in found]


def port_of(text: str, variable: str) -> int:
    """The port that a variable names. Raises LaunchError for what cannot be one."""
    if not (text.isdecimal() and 1024 <= int(text) <= 65535):
        raise LaunchError(f"{variable} is {text!r:.40}", why="a port is a number from 1024 to 65535")
    return int(text)


def loopback() -> str:
    """The name of the loopback interface; empty where it has another one."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")


def interface_of(address: str) -> str:
    """The interface with an address of this machine; empty where none is found."""
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    mapped = getattr(wanted, "ipv4_mapped", None)
    wanted = mapped or wanted
    if wanted.is_loopback:
        return loopback()
    if wanted.version == 6:
        lines = OF_IPV6.read_text().splitlines() if OF_IPV6.exists() else []
        rows = [line.split() for line in lines]
        return next((row[5] for row in rows if bytes.fromhex(row[0]) == wanted.packed), "")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(asker, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if answer[20:24] == wanted.packed:
                    return name
    return ""


def interface_to(address: str, port: int) -> str:
    """The interface through which another machine is reached; empty where none is found, or it is this machine."""
    with contextlib.suppress(OSError):
        family, kind, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # of datagrams: nothing is sent
            own = str(probe.getsockname()[0])
        return "" if ipaddress.ip_address(own.partition("%")[0]).is_loopback else interface_of(own)
    return ""


__all__ = ["interface_of", "interface_to", "loopback", "port_of", "resolve"]
