"""The mesh of a pipeline: the axis ``pp`` counts its ranks, the other axes are the ranks that share a stage."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.core.mesh import Mesh
from meshwright.core.rank_numbers import PipelineRank, StageRank, WorldRank
from meshwright.core.techniques import Techniques
from meshwright.errors import MeshError, PlanError
from meshwright.pipeline.actions import is_own, parse
from meshwright.pipeline.schedules import SCHEDULES
from meshwright.plan.plan import Plan

AXIS = "pp"


@dataclass(frozen=True)
class Meshes:
    """`world`: all ranks. `stage`: those that share one, as its mesh without the pipeline's axis. `own`: where places
    of the pipeline have meshes of their own, that of each; their ranks follow one another in the world."""

    world: Mesh
    stage: Mesh
    own: tuple[Mesh, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """The prime axes of the pipeline; none where places have meshes of their own."""
        return () if self.own else tuple(a.name for a in self.world.axes if a.name not in self.stage.sizes)

    @property
    def places(self) -> int:
        """How many ranks follow one another."""
        return len(self.own) or self.world.count(self.axes)

    @property
    def every_place(self) -> tuple[PipelineRank, ...]:
        """The places, in the order of the pipeline."""
        return tuple(map(PipelineRank, range(self.places)))

    def mesh_at(self, place: PipelineRank) -> Mesh:
        """The mesh of the ranks at a place of the pipeline."""
        return self.own[place] if self.own else self.stage

    @functools.cached_property
    def _edges(self) -> tuple[int, ...]:
        """Where the ranks of each place begin, and where the last ones end."""
        return tuple(itertools.accumulate((mesh.size for mesh in self.own), initial=0))

    def place(self, rank: WorldRank) -> PipelineRank:
        """Where in the pipeline a rank of the world is."""
        if self.own:
            return PipelineRank(bisect.bisect_right(self._edges, rank) - 1)
        at, place = self.world.coordinate(rank), 0
        for axis in self.axes:
            place = place * self.world.sizes[axis] + at[axis]
        return PipelineRank(place)

    def within(self, rank: WorldRank) -> StageRank:
        """Its number among those that share its stages."""
        if self.own:
            return StageRank(rank - self._edges[self.place(rank)])
        return StageRank(self.stage.rank(self.world.coordinate(rank)))

    def at(self, place: PipelineRank, within: StageRank) -> WorldRank:
        """The rank of the world at a place of the pipeline, with such a number among those that share its stages."""
        if self.own:
            return WorldRank(self._edges[place] + within)
        left, where = int(place), self.stage.coordinate(within)
        for axis in reversed(self.axes):
            left, where[axis] = divmod(left, self.world.sizes[axis])
        return WorldRank(self.world.rank(where))

    def ranks_at(self, place: PipelineRank) -> tuple[WorldRank, ...]:
        """The ranks of the world at a place, by their numbers there."""
        return tuple(self.at(place, StageRank(n)) for n in range(self.mesh_at(place).size))


def meshes_of(plan: Plan) -> Meshes:
    """The meshes of a plan with stages."""
    return Meshes(plan.ranks, plan.mesh, plan.meshes)


def meshes(mesh: Mesh, techniques: Techniques, *, total: bool) -> Meshes:
    """The meshes for stages. A mesh with an axis ``pp`` is that of the world; else one that says how many ranks there
    are in `total` is divided, and one of axes is that of a stage. Raises PlanError for sizes that do not divide."""
    names = dict(mesh.names)
    if AXIS in names:
        run = names[AXIS]
        if mesh.order != tuple(range(mesh.size)):
            raise PlanError(
                "pipeline= on a mesh with its own rank order", hint="give the mesh of a stage, without pp"
            )
        axes = tuple(a for a in mesh.axes if a.name not in run)
        stage = Mesh(axes, tuple((n, r) for n, r in mesh.names if n != AXIS)) if axes else Mesh.of(ranks=1)
        if not axes:
            mesh = Mesh((*mesh.axes, *stage.axes), (*mesh.names, *stage.names))
        found = Meshes(mesh, stage)
        check_chunks(techniques, found.places)
        return found
    count = _ranks(techniques)
    if total:
        if mesh.size % count:
            if is_own(techniques):
                raise PlanError(
                    f"the schedule {parse(techniques.schedule).name} is of {count} ranks",
                    why=f"{mesh.size} ranks do not divide by {count}",
                    hint=f"mesh={count}, or lists for {math.gcd(count, mesh.size)}",
                )
            fewer, each = math.gcd(count, mesh.size), techniques.pipeline // count
            raise PlanError(
                f"pipeline={techniques.pipeline} needs {count} times as many ranks as share a stage",
                why=f"{mesh.size} ranks do not divide by {count}",
                hint=f"{f'pipeline={fewer * each}, or ' if fewer > 1 else ''}a multiple of {count} ranks",
            )
        mesh = Mesh.of(ranks=mesh.size // count)
    return Meshes(_before(mesh, count), mesh)


def own_meshes(given: Sequence[Mesh]) -> Meshes:
    """The meshes for stages whose places have meshes of their own, in the order of the pipeline. Raises PlanError."""
    if len(given) < 2:
        raise PlanError(
            f"a list or tuple of {len(given)} is given as the mesh"
            + "".join(f", with {mesh}" for mesh in given),
            why="a list or tuple has a mesh for each rank of a pipeline, of which there are two or more",
            hint='one mesh: mesh=4 or mesh={"dp": 2, "tp": 2}; of two stages: mesh=[{"dp": 4}, {"dp": 2, "tp": 2}]',
        )
    along = next((mesh for mesh in given if AXIS in dict(mesh.names)), None)
    if along is not None:
        raise PlanError(
            f"a mesh of a list has an axis {AXIS} ({along})",
            why="that is the name of the axis along which a pipeline runs, and the list says that already",
            hint="leave the axis out, or give it another name",
        )
    return Meshes(Mesh.of(ranks=sum(mesh.size for mesh in given)), given[0], tuple(given))


def _ranks(techniques: Techniques) -> int:
    """How many ranks follow one another where no mesh says it: a stage each, two for schedules that ask for more, and
    as many as a schedule of the user's own has."""
    if is_own(techniques):
        return len(parse(techniques.schedule).actions)
    chunks = SCHEDULES[techniques.schedule].least if techniques.schedule in SCHEDULES else 1
    ranks = techniques.pipeline // chunks
    if not ranks or techniques.pipeline % chunks:
        raise PlanError(
            f"{techniques.schedule} with {techniques.pipeline} stages",
            why=f"each rank has {chunks} of them",
            hint=f"pipeline={chunks * max(2, ranks)}",
        )
    return ranks


def check_chunks(techniques: Techniques, ranks: int) -> None:
    """Raise PlanError for stages that the ranks of a pipeline do not share evenly, where no schedule of the user's own
    says who has which."""
    stages = techniques.pipeline
    if stages % ranks and not is_own(techniques):
        raise PlanError(
            f"pipeline={stages} on {ranks} ranks of the axis {AXIS}",
            why="every rank of the pipeline holds equally many stages",
            hint=f"pipeline={ranks * max(1, stages // ranks)}",
        )


def _before(mesh: Mesh, count: int) -> Mesh:
    """The mesh with the pipeline's axis as the slowest."""
    made = Mesh.of({AXIS: count})
    clash = sorted({AXIS, *made.sizes} & {*mesh.sizes, *dict(mesh.names)})
    if clash:
        raise MeshError(
            f"the mesh has an axis {clash[0]!r}",
            why="that is the name of the axis along which a pipeline runs",
            hint="give the axis another name",
        )
    order = tuple(p * mesh.size + r for p in range(count) for r in mesh.order)
    return Mesh((*made.axes, *mesh.axes), (*made.names, *mesh.names), order)


__all__ = ["AXIS", "Meshes", "check_chunks", "meshes", "meshes_of", "own_meshes"]
