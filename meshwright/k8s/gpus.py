"""The machine that the labels of nodes name, as a preset of `meshwright.cost.presets`.

Labels are those of NVIDIA's gpu-feature-discovery, of AMD's node labeller, and of Google's node pools. What has no
NVLink, is shared or partitioned (…-PCIe, …-SHARED, …-MIG-1g.10gb) is no preset.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from meshwright.errors import ClusterError

Object = dict[str, Any]
PRESETS = {
    "nvidia.com/gpu.product": {
        "NVIDIA-A100-SXM4-40GB": "a100-40",
        "NVIDIA-A100-SXM4-80GB": "a100-80",
        "NVIDIA-H100-80GB-HBM3": "h100",
        "NVIDIA-H200": "h200",
        "NVIDIA-B200": "b200",
    },
    "cloud.google.com/gke-accelerator": {
        "nvidia-tesla-a100": "a100-40",
        "nvidia-a100-80gb": "a100-80",
        "nvidia-h100-80gb": "h100",
        "nvidia-h100-mega-80gb": "h100",
        "nvidia-h200-141gb": "h200",
        "nvidia-b200": "b200",
    },
    "amd.com/gpu.product-name": {"AMD_Instinct_MI300X_OAM": "mi300x"},
}


def preset_of(nodes: Iterable[Object]) -> str:
    """The preset of the GPU that all nodes with one have. Nodes that take no new pods do not count.

    Raises ClusterError if no label names a GPU, if two differ, or if there is no preset of it.
    """
    found: dict[str, str] = {}
    for node in nodes:
        labels = node["metadata"].get("labels", {})
        label = next((label for label in PRESETS if labels.get(label)), None)
        if label is not None and not node.get("spec", {}).get("unschedulable"):
            found.setdefault(labels[label], label)
    hint = "plan: {cluster: h100}, another preset, or a cluster file"
    if not found:
        raise ClusterError("no label of a node names its GPU", why=f"labels: {', '.join(PRESETS)}", hint=hint)
    presets = {PRESETS[label].get(product, "") for product, label in found.items()}
    if len(presets) > 1:
        raise ClusterError(
            f"nodes have different GPUs: {', '.join(sorted(found))}",
            why="a plan is for one",
            hint="workers.pod.nodeSelector chooses nodes, or plan.cluster names the machine",
        )
    if not (preset := presets.pop()):
        raise ClusterError(f"there is no preset of {', '.join(sorted(found))}", hint=hint)
    return preset


__all__ = ["PRESETS", "preset_of"]
