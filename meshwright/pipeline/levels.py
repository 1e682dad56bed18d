"""Which levels of a cluster a pipeline runs along: how many ranks of each follow one another, and what the others
share.

A pipeline may take ranks of any level: nodes that follow one another are what slow links bear best, and stages inside
of a node leave a rank of each to every network card.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from meshwright.core.mesh import Axis, Mesh, prime_factors
from meshwright.core.rank_numbers import PipelineRank, StageRank
from meshwright.cost.cluster import Cluster
from meshwright.cost.cluster_data import Level
from meshwright.errors import PlanError
from meshwright.pipeline.meshes import AXIS, Meshes


def mesh_over(cluster: Cluster, taken: Sequence[int]) -> Mesh:
    """The mesh of all ranks whose axis ``pp`` has so many ranks of each level, those furthest apart; what is left of a
    level goes by its name."""
    axes: list[Axis] = []
    along: list[str] = []
    names: list[tuple[str, tuple[str, ...]]] = []
    for level, count in zip(cluster.levels, taken, strict=True):
        for prime in prime_factors(count):
            along.append(f"{AXIS}{len(along)}")
            axes.append(Axis(along[-1], prime, level.name))
        primes = prime_factors(level.size // count)
        if not primes:
            continue
        run = (level.name,) if len(primes) == 1 else tuple(f"{level.name}{n}" for n in range(len(primes)))
        axes += [Axis(name, prime, level.name) for name, prime in zip(run, primes, strict=True)]
        names.append((level.name, run))
    if len(along) == 1:
        axes = [replace(a, name=AXIS) if a.name == along[0] else a for a in axes]
        along = [AXIS]
    return Mesh(tuple(axes), ((AXIS, tuple(along)), *names))


def taken_of(cluster: Cluster, world: Meshes) -> tuple[int, ...]:
    """How many ranks of each level of the cluster follow one another. Raises PlanError where axes of the mesh do not
    fill levels of the cluster, or are not as many ranks."""
    mesh, places = world.world, world.places
    if places > cluster.ranks:
        raise PlanError(
            f"{places} pipeline ranks on a cluster of {cluster.ranks}",
            why="each rank of the pipeline needs a device of its own",
            hint=f"pipeline={cluster.ranks}",
        )
    check_all(cluster, world)
    found, inner = [1] * len(cluster.levels), 1
    for axis in reversed(mesh.axes):
        outer = inner * axis.size
        if axis.name in world.axes:
            for number, (least, most) in enumerate(_borders(cluster)):
                low, high = max(least, inner), min(most, outer)
                level = cluster.levels[number]
                if high > low and (high % low or level.size % (found[number] * (high // low))):
                    raise PlanError(
                        f"{places} pipeline ranks over the levels of {cluster.name}",
                        why=f"{axis.size} of them do not divide {level.name}={level.size}",
                        hint="as many stages as divide the outermost level",
                    )
                found[number] *= high // low if high > low else 1
        inner = outer
    return tuple(found)


def _borders(cluster: Cluster) -> list[tuple[int, int]]:
    """For each level how many ranks are within one unit of it, and within all."""
    found, inner = list[tuple[int, int]](), 1
    for level in reversed(cluster.levels):
        found.append((inner, inner * level.size))
        inner *= level.size
    return found[::-1]


def within_stage(cluster: Cluster, taken: Sequence[int]) -> Cluster:
    """The part of a cluster that shares a stage."""
    levels = (replace(v, size=v.size // n) for v, n in zip(cluster.levels, taken, strict=True))
    return replace(cluster, levels=tuple(levels))


def link_between(cluster: Cluster, taken: Sequence[int]) -> Level:
    """The level that messages between neighbours in a pipeline cross: the slowest of those it runs along."""
    along = [level for level, count in zip(cluster.levels, taken, strict=True) if count > 1]
    return along[0] if along else cluster.levels[-1]


def link_of(cluster: Cluster, world: Meshes) -> Level:
    """The level that messages between neighbours in a pipeline cross, of whatever meshes."""
    if not world.own:
        return link_between(cluster, taken_of(cluster, world))
    check_all(cluster, world)
    outermost, unit = len(cluster.levels) - 1, 1
    for number in range(len(cluster.levels) - 1, -1, -1):
        for one, other in itertools.pairwise(world.every_place):
            first, last = world.at(one, StageRank(0)), world.at(other, StageRank(world.own[other].size - 1))
            if first // unit != last // unit:
                outermost = number
        unit *= cluster.levels[number].size
    return cluster.levels[outermost]


def along(cluster: Cluster, world: Meshes) -> Meshes:
    """Meshes of places of their own, whose world says over which level messages between them go."""
    link = link_of(cluster, world).name
    axes = tuple(replace(axis, link=link) for axis in world.world.axes)
    return replace(world, world=replace(world.world, axes=axes))


def check_all(cluster: Cluster, world: Meshes) -> None:
    """Raise PlanError where the ranks of a pipeline are not those of a cluster."""
    if world.world.size != cluster.ranks:
        text = f" ({' + '.join(str(mesh.size) for mesh in world.own)})" if world.own else ""
        raise PlanError(
            f"the mesh has {world.world.size} ranks{text}, the cluster {cluster.ranks}",
            why=f"mesh of all ranks: {world.world}",
            hint="leave out mesh= to use the cluster's own, or make the sizes agree",
        )


def part_of(cluster: Cluster, world: Meshes, place: PipelineRank) -> Cluster:
    """Return the part of a cluster on which a place of a pipeline has its own mesh: complete units of some levels, or
    some ranks of one. Raises PlanError for other sets of ranks."""
    check_all(cluster, world)
    first, count = world.at(place, StageRank(0)), world.own[place].size
    sizes, unit, left = list[int](), 1, count
    for level in reversed(cluster.levels):
        inside = first % (unit * level.size) // unit
        whole = inside == 0 and left % level.size == 0
        sizes.append(level.size if whole else left)
        if not whole and (first % unit or inside + left > level.size):
            raise PlanError(
                f"ranks {first} to {first + count - 1} of {cluster.name} as one mesh",
                why=f"they begin or end within a {level.name} of {level.size}",
                hint="an order of meshes in which each fills complete units of a level, or fits into one",
            )
        unit, left = unit * level.size, left // sizes[-1]
    levels = (replace(v, size=n) for v, n in zip(cluster.levels, reversed(sizes), strict=True))
    return replace(cluster, levels=tuple(levels))


__all__ = ["along", "link_between", "link_of", "mesh_over", "part_of", "taken_of", "within_stage"]
