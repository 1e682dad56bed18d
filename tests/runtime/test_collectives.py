"""The record of each collective against what it does: on arrays, on simulated ranks, and on the communicators."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from meshwright.core.collectives import COLLECTIVES, REGISTERED, CollectiveKind
from meshwright.core.mesh import Mesh
from meshwright.runtime.communicator import Alone, Counter, ProcessGroups, SimulatedRank, SimulatedWorld

RANKS, CHUNK = 3, 4
KINDS = pytest.mark.parametrize("kind", REGISTERED.values(), ids=lambda kind: kind.name)


def flat(found) -> np.ndarray:
    return np.concatenate(found) if isinstance(found, list) else np.asarray(found)


def on_arrays(kind: CollectiveKind, brought: np.ndarray, **options: int) -> np.ndarray:
    """What the members get of the flat arrays that they bring, by the record."""
    by_member = [row.reshape(RANKS, -1) if kind.splits else row for row in brought]
    return np.stack([flat(kind.meaning(by_member, m, **options)) for m in range(RANKS)])


def brought(kind: CollectiveKind, seed: int) -> np.ndarray:
    """Integers, so that sums are exact."""
    size = CHUNK * (RANKS if kind.splits else 1)
    return np.random.default_rng(seed).integers(-9, 9, (RANKS, size)).astype(np.float64)


@KINDS
def test_a_dual_takes_the_gradient_back(kind):
    """⟨f(x), g⟩ = ⟨x, dual(g)⟩ over all members."""
    x = brought(kind, 0)
    y = on_arrays(kind, x)
    g = np.random.default_rng(1).integers(-9, 9, y.shape).astype(np.float64)
    assert np.sum(y * g) == np.sum(x * on_arrays(REGISTERED[kind.dual], g, **kind.dual_options))


@KINDS
def test_simulated_ranks_do_what_the_record_means(kind):
    x = torch.from_numpy(brought(kind, 2))

    def body(comm: SimulatedRank) -> torch.Tensor:
        mine = x[comm.rank]
        if kind.splits and kind.chunks == "padded":
            mine = mine.view(RANKS, -1)
        sizes = [[CHUNK] * RANKS] * 2 if kind.chunks == "own" else []
        started = getattr(comm, kind.start)(mine.clone(), *sizes, ("tp",)).wait()
        waited = getattr(comm, kind.name)(mine, *sizes, ("tp",))
        assert torch.equal(started, waited)
        return waited.reshape(-1)

    found = torch.stack(SimulatedWorld(Mesh.of(tp=RANKS)).run(body)).numpy()
    assert np.array_equal(found, on_arrays(kind, x.numpy()))


@KINDS
@pytest.mark.parametrize("communicator", [Alone, Counter, SimulatedRank, ProcessGroups])
def test_every_communicator_has_it(kind, communicator):
    assert callable(getattr(communicator, kind.name)) and callable(getattr(communicator, kind.start))


def test_a_reduce_scatter_and_an_all_gather_send_what_an_all_reduce_does():
    halves = (REGISTERED[n].sent(RANKS, CHUNK, CHUNK) for n in ("reduce_scatter", "all_gather"))
    assert sum(halves) == REGISTERED["all_reduce"].sent(RANKS, RANKS * CHUNK, RANKS * CHUNK)


def test_what_reshards_and_is_measured_is_a_path_of_a_matrix():
    """Each collective of a redistribution is measured between two layouts, of which it makes the second."""
    measured = [kind.measured for kind in COLLECTIVES.values()]
    assert len(set(measured)) == len(COLLECTIVES) and all(measured)
    for kind in COLLECTIVES.values():
        before, after = kind.measured
        assert (before == "partial") == kind.adds and (after == "replicated") == (not kind.splits)
