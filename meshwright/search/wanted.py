"""The input of a planner: the model's graph and all options of the user."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.core.folding import Folding
from meshwright.core.graph import Graph
from meshwright.core.mesh import Mesh
from meshwright.core.techniques import Techniques
from meshwright.errors import MeshError, a_type
from meshwright.launchers import launched
from meshwright.pipeline.meshes import own_meshes
from meshwright.plan.plan import Plan
from meshwright.search.annotations import mesh_of_pins
from meshwright.search.planner import Request

Pins = Mapping[str, Mapping[str, Any]]
OneMesh = Mesh | int | Mapping[str, int] | None
MeshLike = OneMesh | Sequence[Mesh | int | Mapping[str, int]]


@dataclass(frozen=True)
class Wanted:
    """`folding`: the repeated layers of the graph; `remarks`: those of the capture; `request`: what a search on a
    cluster is asked for, None without a cluster. The rest is as `mw.plan` takes it."""

    graph: Graph
    folding: Folding
    remarks: tuple[str, ...]
    mesh: MeshLike
    mode: str | None
    pins: Pins | None
    request: Request | None
    techniques: Techniques

    def finished(self, plan: Plan) -> Plan:
        """The plan with its equal layers folded, and the remarks of the capture."""
        blocks = [(b.start, b.length, b.repeats) for b in self.folding.blocks]
        return plan.folded(self.graph, blocks).with_notes(*self.remarks)


def mesh_from(mesh: MeshLike, graph: Graph | None = None) -> Mesh:
    """A mesh from what the user gave, else from the layouts in the model, else of the launched ranks. Raises
    MeshError."""
    if isinstance(mesh, list | tuple):
        mesh = own_meshes(each_mesh(mesh)).world
    match mesh:
        case Mesh():
            return mesh
        case Mapping() if mesh:
            return Mesh.of(mesh)
        case bool():
            pass  # True is an int, and no number of ranks
        case int():
            return Mesh.of(ranks=mesh)
        case None:
            found = mesh_of_pins(graph) if graph is not None else None
            return found or Mesh.of(ranks=launched().world)
    empty = "no axes" if isinstance(mesh, Mapping) else f"{a_type(mesh)}"
    raise MeshError(
        f"mesh={mesh!r} is not a mesh",
        why=f"it is {empty}; a mesh is a number of ranks, or the sizes of named axes",
        hint='mesh=4, or mesh={"dp": 2, "tp": 2}',
    )


def each_mesh(given: Sequence[Mesh | int | Mapping[str, int]]) -> list[Mesh]:
    """The meshes of a list, of which each rank of a pipeline has one. Raises MeshError for a tuple of numbers, which is
    the shape of one mesh to `torch.distributed.init_device_mesh`."""
    numbers = [one for one in given if isinstance(one, int)] if isinstance(given, tuple) else []
    if len(numbers) == len(given) > 1:
        named = dict(zip(("dp", "tp", "cp", "ep"), numbers, strict=False))
        shown = f"mesh={named}".replace("'", '"')
        raise MeshError(
            f"mesh={given!r} is not a mesh",
            why="a tuple of numbers may mean the shape of one mesh, or a mesh for each rank of a pipeline",
            hint=f"{shown} for one mesh of {math.prod(numbers)} ranks; mesh={numbers} for a pipeline of "
            f"{len(given)} stages, in each of which so many ranks share the batch",
        )
    return [mesh_from(one) for one in given]


__all__ = ["MeshLike", "OneMesh", "Pins", "Wanted", "each_mesh", "mesh_from"]
