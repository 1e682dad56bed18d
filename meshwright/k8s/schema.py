"""The definition of the resource, made from its records: a structural schema, as API servers since 1.16 want it."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import inspect

from meshwright.k8s import resource as r

COLUMNS = (
    ("State", "string", ".status.state"),
    ("Workers", "string", ".status.ready"),
    ("Step", "integer", ".status.step"),
    ("Loss", "string", ".status.loss"),
    ("Restarts", "integer", ".status.restarts"),
    ("Attempt", "string", ".status.attempt"),
    ("Age", "date", ".metadata.creationTimestamp"),
)


def definition() -> dict[str, Any]:
    """The CustomResourceDefinition of ParallelJob."""
    schema = {
        "type": "object",
        "required": ["metadata", "spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {
                "type": "object",
                "properties": {"name": {"type": "string", "pattern": r.NAME, "maxLength": r.NAME_CHARACTERS}},
            },
            "spec": schema_of(r.Spec),
            "status": schema_of(r.Status),
        },
    }
    version = {
        "name": r.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.workers.replicas",
                "statusReplicasPath": ".status.workers",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            {"name": name, "type": kind, "jsonPath": path} for name, kind, path in COLUMNS
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{r.PLURAL}.{r.GROUP}"},
        "spec": {
            "group": r.GROUP,
            "scope": "Namespaced",
            "names": {"kind": r.KIND, "plural": r.PLURAL, "singular": r.KIND.lower(), "shortNames": ["pj"]},
            "versions": [version],
        },
    }


def schema_of(kind: Any) -> dict[str, Any]:
    """The schema of a record, or of another type that one has."""
    return _schema(inspect.type_info(kind))


def _schema(kind: inspect.Type) -> dict[str, Any]:
    match kind:
        case inspect.Metadata():
            return _schema(kind.type) | (kind.extra_json_schema or {})
        case inspect.StructType():
            return _of_struct(kind)
        case inspect.UnionType():
            one = [t for t in kind.types if not isinstance(t, inspect.NoneType)]
            assert len(one) == 1, "a structural schema has one type for a field"
            return _schema(one[0])
        case inspect.LiteralType():
            return {"type": "string", "enum": list(kind.values)}
        case inspect.StrType():
            return {"type": "string"} | _limits(
                minLength=kind.min_length, maxLength=kind.max_length, pattern=kind.pattern
            )
        case inspect.IntType():
            return {"type": "integer"} | _limits(minimum=kind.ge, maximum=kind.le)
        case inspect.BoolType():
            return {"type": "boolean"}
        case inspect.ListType():
            limits = _limits(minItems=kind.min_length, maxItems=kind.max_length)
            return {"type": "array", "items": _schema(kind.item_type)} | limits
        case inspect.DictType() if isinstance(kind.value_type, inspect.AnyType):
            return {"type": "object"}
        case inspect.DictType():
            return {"type": "object", "additionalProperties": _schema(kind.value_type)}
    raise TypeError(f"no schema for {kind}")


def _of_struct(kind: inspect.StructType) -> dict[str, Any]:
    required = [f.encode_name for f in kind.fields if f.required]
    return {
        "type": "object",
        **({"required": required} if required else {}),
        "properties": {f.encode_name: _schema(f.type) | _default(f.default) for f in kind.fields},
    }


def _default(value: Any) -> dict[str, Any]:
    """The default that `kubectl get -o yaml` shall show: of policies and limits, not of what is empty."""
    return {"default": value} if isinstance(value, str | int) and value not in ("", 0, False) else {}


def _limits(**limits: Any) -> dict[str, Any]:
    return {name: value for name, value in limits.items() if value is not None}


def as_yaml(*objects: dict[str, Any]) -> str:
    """Objects as documents of one file."""
    return "---\n".join(msgspec.yaml.encode(o).decode() for o in objects)


__all__ = ["as_yaml", "definition", "schema_of"]


if __name__ == "__main__":  # python -m meshwright.k8s.schema > deploy/crd.yaml
    print(as_yaml(definition()), end="")
