"""Several machines on one: network namespaces joined by a bridge, each with an address of its own. Where namespaces are
not allowed they are addresses of the loopback network, which share ports and interfaces."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

USES = itertools.count()  # links go some time after their namespace


@dataclass(frozen=True)
class Machine:
    """`address`: its own. `prefix`: what runs a command there. `port`: of the bridge, which the others are reached
    through; empty where there is none."""

    address: str
    prefix: tuple[str, ...] = ()
    port: str = ""

    @contextlib.contextmanager
    def unreachable(self) -> Iterator[None]:
        """Within it, nothing comes from there and nothing arrives."""
        ip("link", "set", self.port, "down")
        try:
            yield
        finally:
            ip("link", "set", self.port, "up")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@contextlib.contextmanager
def machines(count: int, *, v6: bool = False) -> Iterator[list[Machine]]:
    """Machines that reach one another. `v6`: by addresses of IPv6."""
    mark = f"mw{os.getpid() % 100000}x{next(USES)}"
    names = [f"{mark}n{i}" for i in range(count)]
    with contextlib.ExitStack() as made:
        try:
            if shutil.which("ip") is None:
                raise OSError("no command ip")
            ip("link", "add", f"{mark}b", "type", "bridge")
            made.callback(ip, "link", "del", f"{mark}b")
            ip("link", "set", f"{mark}b", "up")
            for i, name in enumerate(names):
                ip("netns", "add", name)
                made.callback(ip, "netns", "del", name)
                ip("link", "add", f"{mark}v{i}", "type", "veth", "peer", "name", "eth0", "netns", name)
                ip("link", "set", f"{mark}v{i}", "master", f"{mark}b", "up")
                ip("-n", name, "addr", "add", f"10.213.7.{i + 1}/24", "dev", "eth0")
                ip("-n", name, "addr", "add", f"fd00:213::{i + 1}/64", "dev", "eth0", "nodad")
                for link in ("lo", "eth0"):
                    ip("-n", name, "link", "set", link, "up")
        except (OSError, subprocess.SubprocessError):
            print("no network namespaces here: the machines are addresses of the loopback network")
            made.close()
            yield [Machine("::1" if v6 else f"127.0.0.{i + 2}") for i in range(count)]
            return
        address = "fd00:213::{}" if v6 else "10.213.7.{}"
        yield [
            Machine(address.format(i + 1), ("ip", "netns", "exec", name), f"{mark}v{i}")
            for i, name in enumerate(names)
        ]
