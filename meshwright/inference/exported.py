"""A forward step as files: what it computes, how it is sharded, and of each rank what it holds.

    served/forward.json              the graph as text, the plan, the layouts of inputs and results, a checksum
    served/rank-0.safetensors        this rank's shards of parameters, buffers and constants, by name of the input
    served/rank-0.json               their checksums

It runs without the code of the model. Nothing is unpickled, and no operator runs that is not one of torch's own
(or one that the reader has given a rule): docs/decisions says why this is not torch.export's format.
"""

from __future__ import annotations

import json
import re
import secrets
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from meshwright import heartbeat
from meshwright.capture import Captured
from meshwright.capture.fold import fold
from meshwright.capture.nest import count
from meshwright.checkpoint.folder import as_path
from meshwright.checkpoint.safetensors_io import Tensor, read_head, read_into, write
from meshwright.checkpoint.step_state import DTYPES, SAFE_NAMES
from meshwright.checkpoint.weights import confirmed
from meshwright.checks.rank_agreement import over_gloo, own_device, prepare
from meshwright.compile import lower, with_model
from meshwright.core.graph import Graph
from meshwright.core.graph_text import parse
from meshwright.errors import CheckpointError, MeshwrightError, a_type
from meshwright.inference.forward_step import ForwardStep
from meshwright.ops.table import has_rule
from meshwright.partition import Partition
from meshwright.plan.plan import Plan
from meshwright.runtime.communicator import Communicator
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.forward import LocalForward
from meshwright.runtime.local_batch import place_of
from meshwright.runtime.operators import torch_operator
from meshwright.runtime.pipeline_rank import Pipeline
from meshwright.runtime.rank import Rank
from meshwright.runtime.rendezvous import Meeting, check_world

VERSION = 1
NAME = "forward.json"
HINT = "export it again: mw.export(step, folder)"
T = TypeVar("T")


class _Program(NamedTuple):
    """The contents of `forward.json`."""

    graph: Graph
    plan: Plan
    shape: Any
    literals: dict[str, Any]
    seed: int
    exact: bool
    word: str


@heartbeat.during("exporting a forward step")
def export(step: ForwardStep, folder: str | Path) -> Path:
    """Write a forward step into a folder: the program and plan as text, and the shards of each rank. Every rank calls
    it.

    Args:
        step: A step from `mw.forward_step`.
        folder: A new or empty folder that all ranks share.

    Returns the folder. Raises CheckpointError on all ranks if the folder is not empty or cannot be written.
    """
    path, meeting, local = as_path(folder), Meeting(), step.local
    rank, literals = local.world.rank, step.literals

    def begin() -> str:
        if rank == 0:
            json.dumps(literals)  # raises TypeError for what a file cannot say
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise CheckpointError(f"{str(path)!r} exists already", hint="a new folder, or an empty one")
            path.mkdir(parents=True, exist_ok=True)
        return secrets.token_hex(8)

    word = meeting.collect(_tried(meeting, path, begin))[0]

    def write_rank() -> None:
        read = {entry.name for entry in local.parts.resharded.graph.inputs}
        with step.access.inside():
            held = {n: x.detach().cpu().contiguous() for n, x in local.leaves.items() if n in read}
        made = write(path / f"rank-{rank}.safetensors", [_tensor(n, x) for n, x in held.items()])
        checks = {name: place.crc for name, place in made.places.items()}
        _put(path / f"rank-{rank}.json", {"word": word, "head": made.head_crc, "tensors": checks})

    _tried(meeting, path, write_rank)

    def write_program() -> None:
        if rank == 0:
            parts = step.parts
            layouts = parts.resharded.layouts
            entries = parts.resharded.graph.inputs
            inputs = {f"{e.role} {e.target}": str(layouts[e.name]) for e in entries}
            said = {
                "word": word,
                "mesh": str(parts.requested.ranks),
                "inputs": inputs,
                "results": [str(layout) for layout in step.layouts],
                "shape": step.shape,
                "literals": literals,
                "seed": local.rank.seed,
                "exact_random": local.rank.exact,
                "graph": str(step.graph).split("\n"),
                "plan": parts.requested.to_json().split("\n"),
            }
            _put(path / NAME, {"meshwright forward": VERSION, "crc32": _crc(said), "program": said})

    _tried(meeting, path, write_program)
    return path


@heartbeat.during("loading an exported forward step", patient=True)
def load_exported(folder: str | Path, *, device: torch.device | str = "cpu") -> ForwardStep:
    """Load a folder that `mw.export` wrote. The model's code is not needed. Every rank calls it.

    Args:
        folder: The folder; it must have been written by the same number of ranks.
        device: The device onto which each rank reads its shards.

    Raises CheckpointError on all ranks for a damaged file, a newer format, or an operator that is neither torch's nor
    has a rule, and RunError for another number of ranks.
    """
    path, meeting, place = as_path(folder), Meeting(), own_device(torch.device(device))
    text = meeting.agree(lambda: _read_text(path / NAME))
    program = _program(text, path)
    check_world(program.plan.ranks)
    captured = Captured(program.graph, {}, fold(program.graph), ())
    parts = lower(captured, with_model(program.plan.check(program.graph), captured))
    over_gloo(meeting, parts.requested, place)
    number = meeting.rank
    sums = _tried(meeting, path, lambda: _sums(path, number, program.word))
    comm = meeting.connect(parts.requested.ranks, place, host=bool(parts.requested.hosts))
    prepare(comm, parts)
    leaves = _tried(meeting, path, lambda: _leaves(path, number, sums, parts, comm, place))
    rank = Rank(comm, place, seed=program.seed, exact=program.exact)
    return ForwardStep(
        LocalForward(parts, rank, leaves), parts, program.shape, program.graph, program.literals
    )


# ---------------------------------------------------------------- steps


def _tried(meeting: Meeting, path: Path, do: Callable[[], T]) -> T:
    """Do something on every rank; an error of one is raised on all."""
    problem, found = None, list[T]()
    try:
        found.append(do())
    except MeshwrightError as error:
        problem = error
    except OSError as error:
        problem = CheckpointError(f"{path} cannot be written or read", why=str(error))
    except (TypeError, ValueError) as error:
        problem = CheckpointError("the example batch has a value that is not plain data", why=str(error))
    confirmed(meeting, problem)
    return found[0]


def _tensor(name: str, x: torch.Tensor) -> Tensor:
    data = x.reshape(-1).view(torch.uint8).numpy()
    return Tensor(name, SAFE_NAMES[x.dtype], tuple(x.shape), lambda: data)


def _put(path: Path, said: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n", "utf-8")


def _crc(said: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(said, sort_keys=True).encode()):08x}"


def _read_text(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"{str(path.parent)!r} has no {NAME}", why=str(error), hint="the folder that mw.export wrote"
        ) from None


def _damaged(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path.name} is damaged", why=why, where=str(path.parent), hint=HINT)


def _program(data: bytes, folder: Path) -> _Program:
    path = folder / NAME
    try:
        head = json.loads(data)
        version, crc, said = head["meshwright forward"], head["crc32"], head["program"]
        if version != VERSION:
            raise CheckpointError(
                f"{NAME} has version {version!r}",
                why=f"this Meshwright reads version {VERSION}",
                where=str(folder),
            )
        if crc != _crc(said):
            raise _damaged(path, f"its checksum is {_crc(said)}, {crc} was written")
        graph, plan = parse("\n".join(said["graph"])), Plan.from_json("\n".join(said["plan"]), str(path))
        found = _Program(
            graph, plan, said["shape"], dict(said["literals"]), int(said["seed"]), bool(said["exact_random"]),
            str(said["word"]),
        )  # fmt: skip
        if count(found.shape) != len(graph.outputs):
            raise _damaged(path, f"{len(graph.outputs)} results do not fit {count(found.shape)} places")
    except MeshwrightError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        raise _damaged(path, f"{a_type(error)}: {error}") from None
    check_operators(graph, folder)
    return found


def check_operators(graph: Graph, folder: Path) -> None:
    """Raise CheckpointError for an operator that a text from elsewhere may not name: anything but an overload of
    torch's own tensor operators, or of one that has a rule here."""
    plain = type(torch.ops.aten.add.Tensor)
    for node in graph.nodes:
        known = has_rule(node.op) or node.op.startswith("aten.")
        named = re.fullmatch(r"\w+\.\w+\.\w+", node.op) is not None and ".from_file." not in node.op
        overload = known and named and isinstance(torch_operator(node), plain | type(check_operators))
        if not overload:
            raise CheckpointError(
                f"the program computes with {node.op}",
                why="it is neither a tensor operator of torch nor an operator with a rule",
                where=str(folder),
                hint="for an operator of your own: import it and call mw.rule before loading",
            )


def _sums(folder: Path, number: int, word: str) -> dict[str, int]:
    """The checksums of a rank's tensors."""
    path = folder / f"rank-{number}.json"
    try:
        said = json.loads(path.read_bytes())
        found = {str(name): int(crc) for name, crc in said["tensors"].items()}
        same = said["word"] == word
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, str(error)) from None
    if not same:
        raise _damaged(path, "it is of another export than the others")
    return found


def _leaves(
    folder: Path,
    number: int,
    sums: Mapping[str, int],
    parts: Partition,
    comm: Communicator,
    device: torch.device,
) -> dict[str, torch.Tensor]:
    """Input → this rank's shard, as its file has it."""
    pipe = Pipeline(parts, comm, training=False) if parts.requested.stages else None
    mine, inside = (parts, comm) if pipe is None else (pipe.parts, pipe.comm)
    mesh, layouts = inside.mesh, mine.resharded.layouts
    path = folder / f"rank-{number}.safetensors"
    places, _, _ = read_head(path)
    found: dict[str, torch.Tensor] = {}
    for entry in mine.resharded.graph.inputs:
        if entry.role == "batch" or (pipe is not None and not pipe.holds(entry.name)):
            continue
        shape = layouts[entry.name].forward.local_shape(mesh, mesh.coordinate(inside.rank))
        dtype, place = SAFE_NAMES[TORCH_DTYPES[entry.type.dtype]], places.get(entry.name)
        if place is None or (place.dtype, place.shape) != (dtype, shape) or entry.name not in sums:
            there = "missing" if place is None else f"{place.dtype}{list(place.shape)}"
            raise _damaged(path, f"{entry.target} is {there}, the program reads {dtype}{list(shape)}")
        data = torch.empty(max(place.size_bytes, 1), dtype=torch.uint8)[: place.size_bytes]
        read_into(path, entry.name, replace(place, crc=sums[entry.name]), data.numpy().data)
        found[entry.name] = data.view(DTYPES[dtype]).view(shape).to(place_of(entry.name, mine, device))
    return found


__all__ = ["check_operators", "export", "load_exported"]
