"""Workers that wait in a queue of Kueue: when a group is over for it, and which pods it keeps.

The workers of a round are one group. Kueue holds them by a scheduling gate until there is room for all. It keeps each
by a finalizer: one that has failed until another pod of its group replaces it, which so needs another name. When all
have ended, the group is over and its quota given back: workers that come then belong to another group, that of the next
round. Independent workers are in no group, and wait one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from meshwright.k8s import resource as r
from meshwright.k8s.records import DONE, Pod


def requeued(spec: r.Spec, workers: Collection[Pod], gone: Collection[str]) -> str:
    """Why the workers of a round have to wait again, as another group; empty if they have not."""
    if not spec.workers.queue or spec.workers.independent:
        return ""
    if any(pod.gated and not pod.held for pod in workers):  # its webhook adds both
        return "for Kueue, the group of workers is over"
    if any(
        pod.held and pod.uid in gone for pod in workers
    ):  # for Kueue, it is not replaced until it has ended
        return "Kueue does not let a pod of a lost node be replaced"
    return ""


def is_left(pod: Pod, status: r.Status, gone: Collection[str]) -> bool:
    """Return whether a pod is nothing but a name that a finalizer keeps."""
    ended = pod.phase == "Failed" or pod.uid in gone or (pod.phase in DONE and pod.round != status.round)
    return pod.held and ended


def waits(workers: Iterable[Pod]) -> bool:
    """Return whether no worker may start yet."""
    found = list(workers)
    return bool(found) and all(pod.gated for pod in found)


def not_queued(spec: r.Spec, workers: Iterable[Pod]) -> str:
    """Say that workers run without having been in the queue; empty if they were, or need not."""
    free = [pod.name for pod in workers if pod.phase == "Running" and not pod.held and not pod.deleting]
    if not spec.workers.queue or not free:
        return ""
    return (
        f"{free[0]} was in no queue: Kueue's integration of pods is off, or leaves this namespace out, and "
        f"workers.queue is {spec.workers.queue}"
    )


__all__ = ["is_left", "not_queued", "requeued", "waits"]
