"""The resource: the manifest in deploy/ is the generated one, and its schema is one that API servers take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from meshwright.errors import LaunchError
from meshwright.k8s import checks
from meshwright.k8s import resource as r
from meshwright.k8s.schema import as_yaml, definition

ROOT = Path(__file__).parents[2]
GOOD: dict[str, Any] = {"image": "i", "command": ["train.py"], "workers": {"replicas": 2}}


def test_the_manifest_in_deploy_is_the_generated_one():
    """`python -m meshwright.k8s.schema > deploy/crd.yaml`."""
    assert (ROOT / "deploy/crd.yaml").read_text("utf-8") == as_yaml(definition())


def test_all_of_the_schema_is_structural():
    known = set(
        "type properties required items enum pattern minimum maximum minItems maxItems maxLength default description "
        "additionalProperties x-kubernetes-preserve-unknown-fields".split()
    )

    def check(schema: dict[str, Any]) -> None:
        assert set(schema) <= known and schema["type"] in ("object", "array", "string", "integer", "boolean")
        assert not {"properties", "additionalProperties"} <= set(schema)
        for one in [
            *schema.get("properties", {}).values(),
            schema.get("items"),
            schema.get("additionalProperties"),
        ]:
            if one is not None:
                check(one)

    check(definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"])


def test_defaults_are_those_of_the_records():
    schema = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    filled = {name: field["default"] for name, field in schema["properties"].items() if "default" in field}
    assert msgspec.convert({**GOOD, **filled}, r.Spec) == msgspec.convert(GOOD, r.Spec)
    assert filled["backoffLimit"] == 6


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"workres": {"replicas": 1}}, "unknown field `workres`"),
        ({"workers": {"replicas": -1}}, "`int` >= 1 - at `spec.workers.replicas`"),
        ({"workers": {}}, "required field `replicas`"),
        ({"workers": {"replicas": 1, "restartPolicy": "Sometimes"}}, "'Sometimes'"),
        ({"image": ""}, "at `spec.image`"),
        ({"command": []}, "length >= 1"),
        ({"command": [" "]}, "empty string"),
        ({"workers": {"replicas": 1, "container": {"image": "x"}}}, "workers.container has image"),
        ({"scheduler": {"pod": {"containers": []}}}, "scheduler.pod has containers"),
        ({"scheduler": {"port": 80}}, "at `spec.scheduler.port`"),
    ],
)
def test_what_cannot_be_is_refused_with_the_field(change, says):
    with pytest.raises(LaunchError) as refused:
        checks.read_spec({**GOOD, **change})
    assert says in f"{refused.value.what} {refused.value.why}"


def test_manifests_of_deploy_and_examples_are_yaml_and_jobs_among_them_can_be():
    found = []
    for file in [*(ROOT / "deploy").glob("*.yaml"), *(ROOT / "examples/k8s").glob("*.yaml")]:
        for object in yaml.safe_load_all(file.read_text("utf-8")):
            assert {"apiVersion", "kind"} <= set(object)
            if object["kind"] == r.KIND:
                checks.check_name(object["metadata"]["name"])
                found.append(checks.read_spec(object["spec"]))
    assert found or not (ROOT / "examples/k8s").exists()
