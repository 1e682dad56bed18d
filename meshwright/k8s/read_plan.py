"""What the operator finds out before a job has its plan: the GPU of its nodes, and what the plan's pod prints."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from meshwright.errors import MeshwrightError
from meshwright.k8s import gpus, observed, planning, records
from meshwright.k8s import pods as p
from meshwright.k8s import resource as r
from meshwright.k8s.api import Api, Refused
from meshwright.k8s.conditions import how

LOG_LINES = 1_000_000  # a plan has a line for each operator; a ConfigMap has at most 1 MiB


async def with_plan(api: Api, job: records.Job, pods: Sequence[records.Pod]) -> records.Job:
    """The job with what is new of its plan. A plan that a pod has made is a ConfigMap then."""
    spec, status = job.spec, job.status
    if spec is None or spec.plan is None or spec.suspend or status.completion_time:
        return job
    if status.plan == p.plan_revision(spec):
        return job
    pod = planning.planner(spec, pods)
    if pod is not None and (
        pod.phase not in records.DONE or pod.uid == status.planner or planning.was_killed(pod)
    ):
        return job
    log = "" if pod is None else await api.log(job.owner.namespace, pod.name, LOG_LINES)
    try:
        if pod is None:
            facts = records.PlanFacts(cluster=await _preset(api, spec))
        elif pod.phase == "Failed":
            said = observed.last_lines(log)
            killed = not said or pod.reason == "OOMKilled"
            facts = records.PlanFacts(problem=how(pod, ()) if killed else said)
        else:
            facts = await _kept(api, job.owner, spec, observed.plan_in(log))
    except (MeshwrightError, Refused) as error:
        if isinstance(error, Refused) and error.status >= 500:
            raise
        facts = records.PlanFacts(problem=str(error))
    return replace(job, plan=facts)


async def _preset(api: Api, spec: r.Spec) -> str:
    assert spec.plan is not None
    if spec.plan.cluster:
        return ""
    selector = spec.workers.pod.get("nodeSelector") or {}
    return gpus.preset_of(await api.nodes(",".join(f"{k}={v}" for k, v in selector.items())))


async def _kept(api: Api, owner: p.Owner, spec: r.Spec, text: str | None) -> records.PlanFacts:
    """Make a plan a ConfigMap, if it is one for the ranks of the job."""
    from meshwright.plan.plan import Plan  # numpy would be a quarter of the operator's start

    if text is None:
        return records.PlanFacts(problem="the log of the plan's pod has no plan")
    plan, ranks = (
        Plan.from_json(text, "the plan that its pod printed"),
        spec.workers.replicas * spec.workers.ranks,
    )
    if plan.ranks.size != ranks:
        wanted = f"{spec.workers.replicas} workers have {ranks} ranks"
        return records.PlanFacts(problem=f"the plan is for {plan.ranks.size} ranks, and {wanted}")
    await api.create(p.plan_map(owner, spec, text))
    return records.PlanFacts(written=True, about=f"{ranks} ranks, {plan.mesh_text}, {plan.mode}")


__all__ = ["with_plan"]
