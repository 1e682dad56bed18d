"""A cluster that KUBECONFIG names, in the place of the control plane of these tests.

K8S_TEST_IMAGE names an image of the Dockerfile that its nodes can pull. KUBECONFIG alone, which many users have set,
runs no test there. All happens in a namespace that is deleted in the end; the definition of ParallelJob stays.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.k8s.control_plane import NAMESPACE, ROOT, Cluster, eventually

IMAGE = os.environ.get("K8S_TEST_IMAGE", "") if os.environ.get("KUBECONFIG") else ""


@dataclass
class GivenCluster(Cluster):
    """Requests go through a proxy of kubectl, which knows how to log in."""

    def env(self, user: str = "admin") -> dict[str, str]:
        return {**os.environ, "HOME": str(Path.home())}

    def kubectl(self, *words: str, given: str = "", check: bool = True):
        return super().kubectl("--namespace", NAMESPACE, *words, given=given, check=check)

    def start_operator(self, name: str = "operator") -> None:
        """Of the jobs of these tests alone, with the rights of KUBECONFIG."""
        words = ["-m", "meshwright.cli", "k8s", "operator", "--namespace", NAMESPACE]
        self.start(name, sys.executable, *words)


@contextlib.contextmanager
def given(folder: Path) -> Iterator[Cluster]:
    """The cluster, with the resource; no operator yet."""
    cluster = GivenCluster(folder, "", IMAGE)
    try:
        cluster.start("proxy", "kubectl", "proxy", "--port", "0")
        log = folder / "proxy.log"
        found = eventually(lambda: re.search(r"127\.0\.0\.1:\d+", log.read_text()), "the proxy serves")
        cluster.server = f"http://{found[0]}"
        cluster.kubectl("apply", "-f", str(ROOT / "deploy/crd.yaml"))
        yield cluster
    finally:
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false", check=False)
        cluster.end()


__all__ = ["IMAGE", "given"]
