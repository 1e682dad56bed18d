"""The network interface that has an address, as gloo and NCCL want it named."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from meshwright.launch.span import loopback

SIOCGIFADDR = 0x8915  # linux/sockios.h
OF_IPV6 = Path("/proc/net/if_inet6")


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


__all__ = ["interface_of"]
