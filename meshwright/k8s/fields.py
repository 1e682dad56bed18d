"""Refuse fields that pods do not have. API servers drop them silently, so a typing error would run.

Which fields there are, the API server says in its OpenAPI document. Where none is at hand, `published` has those of
the newest release of Kubernetes that was looked at (`tools/record_pod_fields.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from meshwright.errors import LaunchError, did_you_mean
from meshwright.k8s import resource as r
from meshwright.k8s.checks import roles

POD, CONTAINER = "PodSpec", "Container"
CORE = "io.k8s.api.core.v1."
SHOWN = 5
# The fields of each type: the type of a field's value, or of the items in it; empty for one without fields.
Types = Mapping[str, Mapping[str, str]]


class Schema(msgspec.Struct, frozen=True):
    """What is of use here of a schema in an OpenAPI document."""

    reference: str = msgspec.field(name="$ref", default="")
    properties: dict[str, Schema] = {}
    items: Schema | None = None
    all_of: list[Schema] = msgspec.field(name="allOf", default=[])


class Components(msgspec.Struct, frozen=True):
    schemas: dict[str, Schema] = {}


class Published(msgspec.Struct, frozen=True):
    """`release`: of Kubernetes, such as 1.37."""

    release: str
    types: dict[str, dict[str, str]]


class Document(msgspec.Struct, frozen=True):
    """`definitions`: of version 2. `components`: of version 3."""

    definitions: dict[str, Schema] = {}
    components: Components = Components()


def types_in(document: bytes) -> Types:
    """The types of an OpenAPI document that pods consist of. Raises ValueError if it has no pods."""
    found = msgspec.json.decode(document, type=Document)
    schemas = found.definitions or found.components.schemas
    if CORE + POD not in schemas:
        raise ValueError("the OpenAPI document of the API server has no pods")
    types: dict[str, dict[str, str]] = {}
    todo = [CORE + POD]
    while todo:
        name = todo.pop()
        if name.removeprefix(CORE) not in types:
            fields = {field: _type(schema) for field, schema in schemas[name].properties.items()}
            types[name.removeprefix(CORE)] = {f: kind.removeprefix(CORE) for f, kind in fields.items()}
            todo += [kind for kind in fields.values() if kind]
    return types


def _type(schema: Schema) -> str:
    for one in (schema, *schema.all_of):
        if one.reference:
            return one.reference.rsplit("/", 1)[1]
    return _type(schema.items) if schema.items is not None else ""


def published() -> Published:
    """The types of the newest release of Kubernetes that was looked at."""
    file = Path(__file__).with_name("pod_fields.json")
    return msgspec.json.decode(file.read_bytes(), type=Published)


def check(spec: r.Spec, types: Types, whose: str = "this cluster") -> None:
    """Refuse a job whose `container` or `pod` has a field that pods do not have. Raises LaunchError."""
    found = [
        wrong
        for name, role in roles(spec)
        for field, given, kind in (("container", role.container, CONTAINER), ("pod", role.pod, POD))
        for wrong in _unknown(given, kind, types, f"{name}.{field}")
    ]
    if found:
        more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise LaunchError(
            ", ".join(f"{where} has {field}" for where, field, _ in found[:SHOWN]) + more,
            why=f"pods of {whose} have no such field",
            hint="; ".join(f"{field}: {hint}" for _, field, hint in found[:SHOWN]),
        )


def _unknown(value: Any, kind: str, types: Types, where: str) -> Iterator[tuple[str, str, str]]:
    """Where it is, the field, and what may have been meant. A value of another type is left to the API server."""
    if isinstance(value, list):
        for number, one in enumerate(value):
            yield from _unknown(one, kind, types, f"{where}[{number}]")
    elif isinstance(value, dict) and (fields := types.get(kind)):
        for field, of in value.items():
            if field in fields:
                yield from _unknown(of, fields[field], types, f"{where}.{field}")
            else:
                yield where, field, did_you_mean(field, fields)


__all__ = ["Types", "check", "published", "types_in"]
