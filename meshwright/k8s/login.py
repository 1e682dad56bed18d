"""Which API server the operator speaks to, and with what: as kubectl finds it, or as a pod does."""

# pyright: reportMissingImports=false
# kopf comes with the extra k8s.

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import kopf

from meshwright.errors import LaunchError
from meshwright.k8s.api import message_of, tls

TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")  # replaced about hourly


def login(*, settings: kopf.OperatorSettings, **_: Any) -> kopf.ConnectionInfo | None:
    """The API server of KUBECONFIG or ~/.kube/config, else that of the cluster around this pod."""
    return kopf.login_with_kubeconfig(settings=settings) or kopf.login_with_service_account(settings=settings)


def server() -> kopf.ConnectionInfo:
    """The API server. Raises LaunchError, before kopf would try again for ever."""
    file = os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        info = login(settings=kopf.OperatorSettings())
        if info is not None:
            tls(info)
    except Exception as error:
        missing = f"has no {error}" if isinstance(error, KeyError) else message_of(error)
        raise LaunchError(
            f"the operator cannot use KUBECONFIG {file}", why=missing, hint="a file with which kubectl works"
        ) from None
    if info is None:
        raise LaunchError(
            "the operator knows no API server",
            why="there is neither KUBECONFIG, nor ~/.kube/config, nor the account of a pod",
            hint="KUBECONFIG=FILE, with which kubectl works",
        )
    known = (info.token, info.username, info.certificate_path, info.certificate_data)
    if str(info.server).startswith("https:") and not any(known):
        raise LaunchError(
            f"the operator cannot use KUBECONFIG {file}",
            why="its user has no token and no certificate, and the operator runs no plugin (exec, auth-provider)",
            hint="run it in the cluster (kubectl apply -k deploy), through kubectl proxy, or with a token of kubectl "
            "create token",
        )
    return info


__all__ = ["TOKEN", "login", "server"]
