"""Checks the arguments of a step before anything is captured or a process group is made."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.checks.model_checks import check_model, check_unwrapped
from meshwright.core.graph import Graph
from meshwright.core.techniques import Techniques
from meshwright.core.type_guards import is_number, is_whole
from meshwright.cost.cluster import Cluster
from meshwright.errors import CaptureError, PlanError, RunError, ServerError, a_type, path_from
from meshwright.pipeline.meshes import meshes
from meshwright.plan.plan import Plan
from meshwright.runtime.rendezvous import check_world
from meshwright.search.wanted import MeshLike, mesh_from
from meshwright.servers.places import JOINS


def check_beside(plan: object, given: Mapping[str, Any]) -> None:
    """Raise PlanError for what a plan has already and is given beside one."""
    names = [name for name, value in given.items() if value is not None]
    if plan is not None and names:
        raise PlanError(
            f"{names[0]}= is given together with a plan",
            why="a plan has its mesh, mode, pins and limit already, which would take precedence silently",
            hint=f"give {names[0]}= to mw.plan(...), or leave out plan=",
        )


def check_ranks(plan: Plan | None, mesh: MeshLike, cluster: Cluster | None, asked: Techniques) -> None:
    """Raise RunError if another number of ranks was launched than a plan, a mesh or a cluster has."""
    if plan is not None:
        check_world(plan.ranks)
    elif mesh is not None:
        given, total = mesh_from(mesh), isinstance(mesh, int)
        plain = asked.pipeline == 1 or isinstance(mesh, list | tuple)
        check_world(given if plain else meshes(given, asked, total=total).world)
    elif cluster is not None:
        check_world(cluster.mesh)


def check_shared(name: str) -> None:
    """Raise ServerError for a step without parameters on servers, where these are all that workers share."""
    if os.environ.get(JOINS):
        raise ServerError(
            f"mw.{name} by a worker that comes while others train",
            why="such workers share what is on servers, and this step has nothing there: each would train a model of "
            "its own",
            hint="mw.parameter_server(…), with batches by step.samples(…); or start all workers together: without "
            "--add-to, on Kubernetes without independent",
        )


def check_capturable(model: Any) -> None:
    """Raise CaptureError for what is no module, and for one that torch has wrapped, compiled or sharded."""
    check_model(model)
    check_unwrapped(model)


def plan_from(given: Any) -> Plan | None:
    """A plan that was given: itself, or read from the path of its file. Raises PlanError."""
    if given is None or isinstance(given, Plan):
        return given
    if not isinstance(given, str | Path):
        raise PlanError(
            f"plan={given!r}",
            why=f"it is {a_type(given)}, neither a plan nor the path of one",
            hint='plan=mw.plan(model, batch, …), or plan="plan.json"',
        )
    return Plan.load(given)


def folder_from(cache: Any) -> Path | None:
    """The folder of captured programs that is given as `cache`. Raises CaptureError for what is no path of one."""
    if cache is None:
        return None
    hint = 'cache=".meshwright", or leave it out'
    path = path_from(cache, f"cache={cache!r:.80} is not a folder", CaptureError, hint)
    try:
        if not str(cache):
            raise OSError("it is an empty text")
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        why = "it is a file" if path.is_file() else error.strerror or str(error)
        raise CaptureError(
            f"cache={cache!r} is not a folder that can be written",
            why=f"{why}; captured programs are kept in a folder, by their content",
            hint=hint,
        ) from None
    return path


def check_switches(**given: Any) -> None:
    """Raise RunError for a switch that is neither on nor off."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise RunError(f"{name}={value!r}", why="it must be True or False", hint="True or False")


def check_random(exact: Any, device: Any, techniques: Techniques) -> None:
    """Raise RunError for what `exact_random` cannot be: another word, or draws in another order than torch's."""
    if exact != "torch":
        if not isinstance(exact, bool):
            raise RunError(
                f"exact_random={exact!r}",
                why="it must be a switch, or name the generator to draw from",
                hint='True, False, or "torch"',
            )
        return
    elsewhere = device is not None and torch.device(device).type != "cpu"
    parts = {"micro_batches": techniques.micro_batches, "pipeline": techniques.pipeline}
    parts["interleave"] = techniques.interleave
    apart = ", ".join(f"{name}={n}" for name, n in parts.items() if n > 1)
    if elsewhere or apart:
        raise RunError(
            f'exact_random="torch" together with {apart or f"device={str(device)!r}"}',
            why="one device draws for the full batch, one operator after the other"
            if apart
            else "the generator of a GPU gives other numbers than that of the CPU",
            hint="exact_random=True, whose numbers are those of one device under any plan, though not torch's own",
        )


def check_numbers(clip_norm: Any, seed: Any, bucket_bytes: Any = None) -> None:
    """Raise RunError for a norm that cannot be clipped to, a seed that is none, and a size of buckets that is none."""
    number = is_number(clip_norm)
    if clip_norm is not None and not (number and clip_norm > 0):
        raise RunError(
            f"clip_norm={clip_norm!r}",
            why="gradients are scaled down to that norm: a number above 0 is expected",
            hint="clip_norm=1.0, math.inf to only compute the norm, or leave it out",
        )
    if not is_whole(seed):
        raise RunError(f"seed={seed!r}", why="a whole number is expected", hint="seed=0")
    if bucket_bytes is not None and (not is_whole(bucket_bytes) or bucket_bytes < 0):
        raise RunError(
            f"bucket_bytes={bucket_bytes!r}",
            why="gradients of so many bytes are reduced together: a whole number from 0 on",
            hint="bucket_bytes=25_000_000, 0 to reduce each alone, or leave it out",
        )


def check_trains(graph: Graph) -> None:
    """Raise PlanError where no gradient of the loss goes to a parameter: nothing would be trained."""
    _, loss = graph.outputs[0]
    if loss not in graph.needs_grad:
        raise PlanError(
            "the loss has no gradient",
            why="it depends on no parameter that is trained, or was detached from them by detach() or no_grad()",
            hint="return the loss without detach(), and set requires_grad on the parameters to train",
        )
