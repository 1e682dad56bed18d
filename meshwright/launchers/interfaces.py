"""The network interface that has an address, as gloo and NCCL want it named."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

SIOCGIFADDR = 0x8915  # linux/sockios.h
OF_IPV6 = Path("/proc/net/if_inet6")


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


__all__ = ["interface_of", "interface_to", "loopback"]
