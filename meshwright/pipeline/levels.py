"""Which levels of a cluster a pipeline runs along: how many ranks of each follow one another, and what the others
share.

A pipeline may take ranks of any level: nodes that follow one another are what slow links bear best, and stages inside
of a node leave a rank of each to every network card.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshwright.cost.cluster import Cluster
from meshwright.cost.parts import Level
from meshwright.errors import PlanError
from meshwright.mesh import Axis, Mesh, prime_factors
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
            why="each rank of the pipeline is another device",
            hint=f"pipeline={cluster.ranks}",
        )
    if mesh.size != cluster.ranks:
        raise PlanError(
            f"the mesh has {mesh.size} ranks, the cluster {cluster.ranks}",
            why=f"mesh of all ranks: {mesh}",
            hint="leave out mesh= to use the cluster's own, or make the sizes agree",
        )
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


__all__ = ["link_between", "mesh_over", "taken_of", "within_stage"]
