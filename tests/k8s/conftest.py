"""One cluster for all tests that need a real API server, and the times that they measure."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest

from tests.k8s import control_plane, given_cluster
from tests.k8s.control_plane import Cluster, eventually
from tests.k8s.jobs import STEPS, Job, with_script

FIGURES = control_plane.ROOT / "build/k8s.json"


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    start = given_cluster.given if given_cluster.IMAGE else control_plane.running
    with start(tmp_path_factory.mktemp("k8s")) as found:
        found.kubectl("create", "namespace", control_plane.NAMESPACE)
        found.start_operator()
        log = found.folder / "operator.log"
        eventually(lambda: "authentication has finished" in log.read_text(), "the operator has logged in")
        yield found


@pytest.fixture(scope="package")
def figures() -> Iterator[dict[str, float]]:
    """Seconds, by what was measured. The file also has the date, and the load of the machine from first to last."""
    found: dict[str, float] = {}
    loads = [os.getloadavg()[0]]
    yield found
    loads.append(os.getloadavg()[0])
    shown: dict[str, object] = {name: round(value, 3) for name, value in found.items()}
    shown |= {"date": date.today().isoformat(), "load": [round(load, 1) for load in loads]}
    FIGURES.parent.mkdir(exist_ok=True)
    FIGURES.write_text(json.dumps(shown, indent=2) + "\n")


@pytest.fixture
def stepping(cluster: Cluster) -> Iterator[Any]:
    """Makes jobs that print steps until they are deleted, or so many."""
    made = []

    def make(name: str, workers: Any = 2, steps: int = 1 << 30, **spec: Any) -> Job:
        made.append(with_script(cluster, name, STEPS, [str(steps)], workers, **spec))
        return made[-1]

    yield make
    for job in made:
        job.delete()
