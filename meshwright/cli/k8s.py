"""`meshwright k8s`: manifests of jobs on Kubernetes, and the operator that runs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Run jobs on Kubernetes: write their manifests, and run the operator.", no_args_is_help=True
)


@app.command(context_settings={"allow_interspersed_args": False})
def manifest(
    command: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script, and its arguments.")
    ],
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Image with the script, Python and Meshwright.")
    ],
    name: Annotated[str, typer.Option(metavar="NAME", help="Name of the job: a-z, 0-9 and -.")],
    workers: Annotated[int, typer.Option(metavar="N", help="How many pods.")] = 1,
    ranks: Annotated[int, typer.Option(metavar="N", help="Ranks of each pod.")] = 1,
    servers: Annotated[int, typer.Option(metavar="N", help="Parameter servers, each in a pod.")] = 0,
    gpus: Annotated[int, typer.Option(metavar="N", help="GPUs of each worker.")] = 0,
    plan: Annotated[
        str, typer.Option(metavar="MODEL", help="Plan MODEL in the cluster before workers start.")
    ] = "",
    cluster: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="With --plan: a preset (h100, cpu) or a cluster file in its pod; default: the nodes' GPU.",
        ),
    ] = "",
    controller: Annotated[
        str,
        typer.Option(
            "--for", metavar="CONTROLLER", help="meshwright, jobset, trainjob, pytorchjob or rayjob."
        ),
    ] = "meshwright",
    queue: Annotated[
        str,
        typer.Option(metavar="NAME", help="A local queue of Kueue, which starts all workers or none."),
    ] = "",
) -> None:
    """Print a manifest that runs a script: meshwright k8s manifest … train.py | kubectl apply -f -."""
    from meshwright.k8s.manifests import Asked, manifest
    from meshwright.k8s.schema import as_yaml

    asked = Asked(name, image, tuple(command), workers, ranks, gpus, queue, servers, plan, cluster)
    print(as_yaml(manifest(asked, controller)), end="")
    if controller == "jobset":
        print(
            f"before it: kubectl create secret generic {name} --from-literal=secret=$(openssl rand -hex 32)",
            file=sys.stderr,
        )


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML with jobs of kind MSJob.")],
) -> None:
    """Print the ParallelJob of each MSJob in a file."""
    import yaml

    from meshwright.errors import LaunchError
    from meshwright.k8s.convert import convert
    from meshwright.k8s.schema import as_yaml

    try:
        found = [convert(job) for job in yaml.safe_load_all(file.read_text("utf-8")) if job is not None]
    except OSError as error:
        raise LaunchError(f"cannot read {file}", why=error.strerror or str(error)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LaunchError(f"{file} is not YAML", why=str(error)) from None
    if not found:
        raise LaunchError(f"{file} has no job", hint="a file with kind: MSJob")
    print(as_yaml(*found), end="")


@app.command()
def operator(
    namespace: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Jobs of this namespace; may be repeated. Default: all."),
    ] = None,
    liveness: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Address for liveness checks: http://0.0.0.0:8080/healthz."),
    ] = None,
) -> None:
    """Run the jobs of a cluster until a signal arrives. The cluster is that of KUBECONFIG, or the one it runs in."""
    import logging

    from meshwright.errors import LaunchError

    try:
        from meshwright.k8s.operator import run
    except ModuleNotFoundError as error:
        raise LaunchError(f"the operator needs {error.name}", hint='pip install "meshwright[k8s]"') from None
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # a line for every event
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    run(tuple(namespace or ()), liveness)


__all__ = ["app"]
