"""etcd, an API server, its controllers and scheduler, and nodes that run pods as processes: all on loopback.

The programs come from `tools/build_kubernetes.sh`. ``python -m tests.k8s.control_plane FOLDER`` runs until it is ended,
and prints the file for kubectl.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "meshwright/k8s/bin"
MISSING = (
    f"no control plane in {CACHE}: make k8s-test builds it"
    if not (CACHE / ".complete").exists()
    else ("" if shutil.which("kubectl") else "no kubectl on PATH")
)
NAMESPACE = "meshwright-test"
PATIENCE_SECONDS = 120.0
OPERATOR = "system:serviceaccount:meshwright:meshwright-operator"
Object = dict[str, Any]


def eventually(found: Callable[[], Any], what: str) -> Any:
    """Wait for a true value, and return it."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not (value := found()):
        assert time.monotonic() < end, f"waited {PATIENCE_SECONDS:.0f} s in vain until {what}"
        time.sleep(0.02)
    return value


@dataclass
class Cluster:
    """`folder`: of all its files. `server`: of its API. `image`: of jobs; here, commands are found on PATH."""

    folder: Path
    server: str
    image: str = "x"
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *command: str | Path, **env: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as out:
            process = subprocess.Popen(
                list(map(str, command)), cwd=ROOT, stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                env={**os.environ, **env}, start_new_session=True,
            )  # fmt: skip
        self.processes[name] = process
        return process

    def kill(self, name: str) -> None:
        """Kill a process, and all that it has started."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def config(self, user: str) -> Path:
        """A file for kubectl. Its server is this one alone."""
        path = self.folder / f"{user}.json"
        cluster = {"server": self.server, "insecure-skip-tls-verify": True}
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": f"token-of-{user}"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}],
        }))  # fmt: skip
        return path

    def env(self, user: str = "admin") -> dict[str, str]:
        """The environment of kubectl."""
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder),
            "KUBECONFIG": str(self.config(user)),
        }

    def kubectl(self, *words: str, given: str = "", check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["kubectl", *words], input=given, capture_output=True, text=True, timeout=60, env=self.env(),
            check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stderr
        return done

    def ask(self, method: str, path: str, body: Object | None = None) -> tuple[int, Object]:
        """Status and answer of one request of an administrator."""
        request = urllib.request.Request(f"{self.server}{path}", method=method)
        request.add_header("Authorization", "Bearer token-of-admin")
        request.add_header(
            "Content-Type", "application/merge-patch+json" if method == "PATCH" else "application/json"
        )
        data = None if body is None else json.dumps(body).encode()
        context = ssl._create_unverified_context()
        try:
            with urllib.request.urlopen(request, data, 30, context=context) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read()
            return error.code, json.loads(text) if text.startswith(b"{") else {"message": text.decode()}

    def get(self, path: str) -> Any:
        """An object, or the objects of a list; None for what is not there."""
        status, answer = self.ask("GET", path)
        return answer.get("items", answer) if status < 400 else None

    def apply(self, *objects: Object, check: bool = True) -> subprocess.CompletedProcess[str]:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)})
        return self.kubectl("apply", "-f", "-", given=text, check=check)

    # ---- what a test starts and kills

    def start_node(self, name: str) -> None:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        certificate = folder / "kubelet.pem"
        if not certificate.exists():
            subject = [
                "-days",
                "2",
                "-subj",
                "/CN=kubelet",
                "-keyout",
                str(certificate),
                "-out",
                str(certificate),
            ]
            command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        config = str(self.config("admin"))
        self.start(
            name, sys.executable, "-m", "tests.k8s.kubelet", name, folder, KUBECONFIG=config, PATH=path
        )

    def start_operator(self, name: str = "operator") -> None:
        """With the rights of deploy/rbac.yaml, and no others."""
        command = [sys.executable, "-m", "meshwright.cli", "k8s", "operator"]
        self.start(name, *command, KUBECONFIG=str(self.config("operator")))

    def end(self) -> None:
        """Kill all of its processes."""
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self.processes.values():
            process.wait()

    def pid(self, pod: str) -> int:
        """The process of a pod."""
        found = next(self.folder.glob(f"*/logs/{NAMESPACE}/{pod}.pid"))
        newest = max(
            self.folder.glob(f"*/logs/{NAMESPACE}/{pod}.pid"), key=lambda p: p.stat().st_mtime, default=found
        )
        return int(newest.read_text())


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Cluster]:
    """A control plane with two nodes, the resource and the operator's rights; no operator yet."""
    etcd, peer, port = _free_ports(3)
    cluster = Cluster(folder, f"https://127.0.0.1:{port}")
    try:
        _start(cluster, etcd, peer, port)
        yield cluster
    finally:
        cluster.end()


def _start(cluster: Cluster, etcd: int, peer: int, port: int) -> None:
    folder = cluster.folder
    key = folder / "accounts.key"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True, timeout=60)
    tokens = folder / "tokens.csv"
    groups = "system:serviceaccounts,system:authenticated"
    tokens.write_text(f'token-of-admin,admin,1,"system:masters"\ntoken-of-operator,{OPERATOR},2,"{groups}"\n')
    here = f"http://127.0.0.1:{etcd}"
    peers = f"http://127.0.0.1:{peer}"
    cluster.start(
        "etcd", CACHE / "etcd", "--data-dir", folder / "etcd", "--listen-client-urls", here,
        "--advertise-client-urls", here, "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers,
        "--initial-cluster", f"default={peers}",
    )  # fmt: skip
    cluster.start(
        "apiserver", CACHE / "kube-apiserver", f"--etcd-servers={here}", "--bind-address=127.0.0.1",
        f"--secure-port={port}", "--insecure-port=0", f"--cert-dir={folder / 'certificates'}",
        f"--token-auth-file={tokens}", "--authorization-mode=RBAC", "--anonymous-auth=false",
        f"--service-account-key-file={key}", f"--service-account-signing-key-file={key}",
        "--service-account-issuer=https://kubernetes.default.svc", "--service-cluster-ip-range=10.0.0.0/24",
        "--endpoint-reconciler-type=none", "--disable-admission-plugins=ServiceAccount",
        "--kubelet-preferred-address-types=InternalIP",
    )  # fmt: skip
    eventually(
        lambda: cluster.kubectl("get", "--raw", "/readyz", check=False).stdout == "ok",
        "the API server is ready",
    )
    for file in ("namespace.yaml", "crd.yaml"):
        cluster.kubectl("apply", "-f", str(ROOT / "deploy" / file))
    cluster.kubectl("apply", "-n", "meshwright", "-f", str(ROOT / "deploy/rbac.yaml"))
    # before the garbage collector starts, which looks for new resources every 30 s alone
    eventually(
        lambda: cluster.get("/apis/meshwright.dev/v1alpha1/paralleljobs") == [], "the resource is served"
    )
    config = cluster.config("admin")
    cluster.start(
        "controllers", CACHE / "kube-controller-manager", f"--kubeconfig={config}", "--leader-elect=false",
        "--controllers=garbagecollector,nodelifecycle,podgc,namespace", "--secure-port=0", "--port=0",
        "--node-monitor-period=1s", "--node-monitor-grace-period=4s",
    )  # fmt: skip
    cluster.start(
        "scheduler", CACHE / "kube-scheduler", f"--kubeconfig={config}", "--leader-elect=false", "--secure-port=0",
        "--port=0",
    )  # fmt: skip
    for name in ("node-a", "node-b"):
        cluster.start_node(name)

    def all_ready() -> bool:
        nodes = cluster.get("/api/v1/nodes")
        ready = [
            n
            for n in nodes
            if any(c["type"] == "Ready" and c["status"] == "True" for c in n["status"]["conditions"])
        ]
        return len(ready) == 2 and not any(n["spec"].get("taints") for n in nodes)

    eventually(all_ready, "both nodes are ready")


__all__ = ["MISSING", "NAMESPACE", "Cluster", "eventually", "running"]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # which ends its processes, as Ctrl-C does
    with running(Path(sys.argv[1])) as started:
        print(started.config("admin"), flush=True)
        signal.pause()
