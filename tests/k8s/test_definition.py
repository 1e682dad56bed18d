"""The definition of jobs comes after the operator, or goes and comes again. The file comes last of those on a real API
server: garbage collectors look for new resources every 30 s alone.
"""

from __future__ import annotations

from tests.k8s import control_plane
from tests.k8s.control_plane import Cluster, eventually
from tests.k8s.jobs import MARKS, OURS

pytestmark = MARKS
CRD = str(control_plane.ROOT / "deploy/crd.yaml")


def served(cluster: Cluster) -> None:
    def found() -> bool:
        return cluster.kubectl("get", "paralleljobs", check=False).returncode == 0

    eventually(found, "the resource is served")


@OURS
def test_jobs_run_whenever_their_definition_comes(cluster, stepping):
    cluster.kill("operator")
    cluster.kubectl("delete", "-f", CRD)
    cluster.start_operator()
    log = cluster.folder / "operator.log"
    eventually(
        lambda: "no paralleljobs.meshwright.dev" in log.read_text(), "the operator says what it misses"
    )
    try:
        for name in ("after-the-operator", "applied-again"):
            cluster.kubectl("apply", "-f", CRD)
            served(cluster)
            job = stepping(name)
            job.runs(2)
            job.delete()
            cluster.kubectl("delete", "-f", CRD)
    finally:
        cluster.kubectl("apply", "-f", CRD)
        served(cluster)
        cluster.kill("operator")
        cluster.start_operator()
