"""Record the fields that pods have, into meshwright/k8s/pod_fields.json: `meshwright k8s convert` refuses others.

    pip install kubernetes && python tools/record_pod_fields.py

They are those of the models in the Python client, whose major version is the minor version of Kubernetes.
"""

# pyright: reportMissingImports=false
# It is in none of the extras: it comes with nothing else that this package needs.

from __future__ import annotations

import json
import re
from pathlib import Path

import kubernetes
from kubernetes import client

FILE = Path(__file__).parents[1] / "meshwright/k8s/pod_fields.json"
MODEL = re.compile(r"\b(CoreV1|V1)(\w+)")  # as in list[V1EnvVar]


def fields(model: str) -> dict[str, str]:
    """The fields of a model, each with the model of its value."""
    of = getattr(client, model)
    found = {of.attribute_map[name]: MODEL.search(kind) for name, kind in of.openapi_types.items()}
    return {field: kind[0] if kind else "" for field, kind in found.items()}


def main() -> None:
    models: dict[str, dict[str, str]] = {}
    todo = ["V1PodSpec"]
    while todo:
        if (model := todo.pop()) not in models:
            models[model] = fields(model)
            todo += filter(None, models[model].values())
    types = {
        MODEL.sub(r"\2", model): {field: MODEL.sub(r"\2", kind) for field, kind in sorted(of.items())}
        for model, of in sorted(models.items())
    }
    release = f"1.{kubernetes.__version__.partition('.')[0]}"
    lines = ",\n".join(f'"{name}": {json.dumps(of)}' for name, of in types.items())
    FILE.write_text(f'{{"release": "{release}", "types": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
