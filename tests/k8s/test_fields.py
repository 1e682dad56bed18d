"""Fields that pods do not have are refused, by the document of an API server or by what is published."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshwright.errors import LaunchError
from meshwright.k8s import checks, fields

CORE = "io.k8s.api.core.v1."
QUANTITY = "io.k8s.apimachinery.pkg.api.resource.Quantity"


def document(version: int) -> bytes:
    """As API servers write it: version 3 wraps a reference that has a default."""
    root = "#/definitions/" if version == 2 else "#/components/schemas/"

    def to(kind: str) -> Any:
        reference = {"$ref": root + kind}
        return reference if version == 2 else {"allOf": [reference], "default": {}}

    limits = {"type": "object", "additionalProperties": to(QUANTITY)}
    schemas = {
        CORE + "PodSpec": {
            "properties": {
                "containers": {"type": "array", "items": to(CORE + "Container")},
                "nodeSelector": {"type": "object", "additionalProperties": {"type": "string"}},
            }
        },
        CORE + "Container": {"properties": {"resources": to(CORE + "Resources"), "tty": {"type": "boolean"}}},
        CORE + "Resources": {"properties": {"limits": limits}},
        CORE + "Node": {"properties": {"spec": {"type": "object"}}},
        QUANTITY: {"type": "string"},
    }
    return json.dumps(
        {"definitions": schemas} if version == 2 else {"components": {"schemas": schemas}}
    ).encode()


@pytest.mark.parametrize("version", [2, 3])
def test_types_of_an_openapi_document(version):
    assert fields.types_in(document(version)) == {
        "PodSpec": {"containers": "Container", "nodeSelector": ""},
        "Container": {"resources": "Resources", "tty": ""},
        "Resources": {"limits": ""},
    }


def test_a_document_without_pods_is_refused():
    with pytest.raises(ValueError, match="has no pods"):
        fields.types_in(b'{"definitions": {}}')


def refusal(types: fields.Types | None = None, **spec: Any) -> LaunchError:
    given = checks.read_spec({"image": "i", "command": ["t.py"], "workers": {"replicas": 1}, **spec})
    with pytest.raises(LaunchError) as refused:
        fields.check(given, fields.published().types if types is None else types)
    return refused.value


@pytest.mark.parametrize(
    ("field", "given", "says", "hint"),
    [
        ("container", {"resource": {}}, "workers.container has resource", "did you mean 'resources'?"),
        ("container", {"resources": {"limit": {}}}, "workers.container.resources has limit", "'limits'"),
        ("container", {"env": [{}, {"name": "A", "valu": "x"}]}, "workers.container.env[1] has valu", "'value'"),
        ("container", {"volumemounts": []}, "workers.container has volumemounts", "'volumeMounts'"),
        ("container", {"nodeSelector": {}}, "workers.container has nodeSelector", "known: args, command"),
        ("pod", {"nodeSelectr": {}}, "workers.pod has nodeSelectr", "'nodeSelector'"),
        ("pod", {"volumes": [{"persistentVolumeClaim": {"claimname": "a"}}]}, "has claimname", "'claimName'"),
        ("pod", {"initContainers": [{"imag": "x"}]}, "workers.pod.initContainers[0] has imag", "'image'"),
        (
            "pod",
            {"affinity": {"nodeAffinity": {"required": {}}}},
            "workers.pod.affinity.nodeAffinity has required",
            "'requiredDuringSchedulingIgnoredDuringExecution'",
        ),
    ],
)  # fmt: skip
def test_a_field_that_is_none_is_named_with_what_may_have_been_meant(field, given, says, hint):
    refused = refusal(workers={"replicas": 1, field: given})
    assert says in refused.what
    if field != "pod" or "affinity" not in given:
        assert hint in refused.hint
    else:
        assert "preferredDuringSchedulingIgnoredDuringExecution" in refused.hint


def test_all_of_them_are_named_in_every_role():
    refused = refusal(
        scheduler={"pod": {"toleration": []}},
        servers={"replicas": 1, "container": {"ressources": {}}},
        plan={"model": "m.py:f", "cluster": "cpu", "pod": {"volume": []}},
    )
    assert refused.what == (
        "servers.container has ressources, scheduler.pod has toleration, plan.pod has volume"
    )
    many = refusal(workers={"replicas": 1, "pod": dict.fromkeys("abcdefg", 1)})
    assert many.what.endswith("workers.pod has e, and 2 more")


def test_what_any_key_may_be_in_is_free_and_wrong_types_are_left_to_the_api_server():
    given = checks.read_spec(
        {
            "image": "i",
            "command": ["t.py"],
            "workers": {
                "replicas": 1,
                "container": {"resources": {"limits": {"nvidia.com/gpu": 8}}, "env": "x", "ports": [1]},
                "pod": {"nodeSelector": {"anything": "x"}, "affinity": None, "volumes": [{"emptyDir": {}}]},
            },
        }
    )
    fields.check(given, fields.published().types)


def test_a_field_of_a_newer_version_is_none_in_an_older_one():
    older = {**fields.published().types, "Container": {"env": "EnvVar"}}
    container = {"env": [{"name": "A"}], "resizePolicy": []}
    assert "has resizePolicy" in refusal(older, workers={"replicas": 1, "container": container}).what
