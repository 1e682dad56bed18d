"""The proof of a plan: simulated ranks in one process against plain single-device PyTorch.

Compared are the loss, every gradient, and every parameter and buffer after three steps of SGD and of AdamW. When
something differs, the forward values (and then their gradients) are compared one by one, and the first that differs is
named. In float64 the explicit float casts of a model are widened on both sides, so what is left is rounding.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from meshwright.capture import Captured, widen, widened_eager
from meshwright.capture.batch import leaves, map_leaves
from meshwright.compile import (
    Loss,
    MeshLike,
    Pins,
    captured_of,
    default_loss,
    lower,
    plan_captured,
    values_of,
)
from meshwright.errors import MeshwrightError
from meshwright.graph import Graph
from meshwright.layout import TensorLayout
from meshwright.mesh import Mesh
from meshwright.partition import Partition
from meshwright.plan import Plan, fingerprint
from meshwright.runtime.collectives import Handle
from meshwright.runtime.communicator import SimulatedRank, SimulatedWorld
from meshwright.runtime.kernels import reference_dropout
from meshwright.runtime.program import build_module
from meshwright.runtime.rank import Rank
from meshwright.runtime.step import LocalStep

STEPS = 3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    # A large epsilon keeps a step from amplifying rounding: with 1e-8, an entry whose gradient is rounding
    # noise moves by lr.
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, eps=1e-3),
}


class VerificationError(MeshwrightError):
    """A plan whose program computes something else than one device."""


@dataclass(frozen=True)
class Difference:
    """The largest difference of one quantity, relative to the largest magnitude in it (or to 1 when that is
    smaller)."""

    what: str
    error: float
    why: str = ""


@dataclass(frozen=True)
class Report:
    """What a verification found. `ok` is true when every difference is within the tolerance."""

    plan: Plan
    dtype: torch.dtype
    tolerance: float
    differences: tuple[Difference, ...]
    first: str = ""

    @property
    def worst(self) -> Difference:
        """The largest difference."""
        return max(self.differences, key=lambda d: d.error if d.error == d.error else float("inf"))

    @property
    def ok(self) -> bool:
        """Everything agrees."""
        return all(d.error <= self.tolerance for d in self.differences)

    def raise_if_different(self) -> Report:
        """The report, if everything agrees. Raises VerificationError that names the first node that differs."""
        if self.ok:
            return self
        wrong = [d for d in self.differences if not d.error <= self.tolerance]
        raise VerificationError(
            f"the plan does not compute what one device computes: {wrong[0].what} differs by {wrong[0].error:.2g}",
            why=f"{len(wrong)} of {len(self.differences)} quantities differ by more than {self.tolerance:g}; "
            f"worst: {self.worst.what} by {self.worst.error:.2g}",
            where=self.first,
            hint="report this with the plan file: a plan that Meshwright made should never differ",
        )

    def __str__(self) -> str:
        verdict = "equal to one device" if self.ok else "DIFFERENT from one device"
        kinds: dict[str, list[Difference]] = {}
        for d in self.differences:
            kinds.setdefault(d.what.split(" of ")[0].split(" after ")[0], []).append(d)
        lines = [
            f"{verdict} ({self.plan.mode} on {self.plan.mesh}, "
            f"{str(self.dtype).removeprefix('torch.')}, tolerance {self.tolerance:g})"
        ]
        for kind, found in kinds.items():
            worst = max(found, key=lambda d: d.error)
            lines.append(
                f"  {kind}: {len(found)} compared, largest difference {worst.error:.2g} ({worst.what})"
            )
        if self.first:
            lines.append(f"  first difference: {self.first}")
        return "\n".join(lines)


def verify(
    model: torch.nn.Module,
    batch: Any,
    *,
    loss: Loss = default_loss,
    plan: Plan | None = None,
    mesh: MeshLike = None,
    mode: str = "data_parallel",
    pins: Pins | None = None,
    dtype: torch.dtype = torch.float64,
) -> Report:
    """Prove a plan on simulated ranks. The model and the batch are not changed; random operators use their exact mode.

    Raises PlanError for a plan of another model. The result says whether all is equal; `raise_if_different` insists.
    """
    captured = captured_of(model, batch, loss)
    chosen = plan if plan is not None else plan_captured(captured, mesh, mode, pins)
    chosen.check(captured.graph)
    wide = dtype == torch.float64
    if wide:
        graph = widen(captured.graph)
        captured = replace(captured, graph=graph)
        chosen = replace(chosen, fingerprint=fingerprint(graph))
    return verify_partition(model, batch, loss, captured, lower(captured, chosen), dtype)


def verify_partition(
    model: torch.nn.Module,
    batch: Any,
    loss: Loss,
    captured: Captured,
    parts: Partition,
    dtype: torch.dtype = torch.float64,
) -> Report:
    """Prove one partition (tests plant faults in it)."""
    cast = _caster(dtype)
    tolerance = TOLERANCE[dtype]
    differences: list[Difference] = []
    batch = map_leaves(batch, cast)
    start = {k: cast(v.detach()) for k, v in values_of(model, captured).items()}
    names = _names(captured.graph)
    for label, factory in OPTIMIZERS.items():
        with _reference_mode(dtype):
            expected = _reference(model, batch, loss, captured.graph, cast, factory)
        ranks = _simulate(parts, batch, start, factory)
        compare = _Comparison(parts, ranks, differences)
        if label == "SGD":
            compare.whole("loss", [r.losses[0] for r in ranks], expected.losses[0])
            for target, name in names["parameter"].items():
                if target not in expected.gradients:
                    grown = max(
                        (r.gradients[target].abs().max().item() for r in ranks if target in r.gradients),
                        default=0.0,
                    )
                    differences.append(Difference(f"gradient of {target}", grown, "one device has none"))
                else:
                    compare.split(
                        f"gradient of {target}",
                        name,
                        [r.gradients.get(target) for r in ranks],
                        expected.gradients[target],
                    )
        for step in range(1, STEPS):
            compare.whole(
                f"loss of step {step} with {label}", [r.losses[step] for r in ranks], expected.losses[step]
            )
        for role in ("parameter", "buffer"):
            for target, name in names[role].items():
                compare.split(
                    f"{role} after {STEPS} steps of {label}: {target}",
                    name,
                    [r.state[name] for r in ranks],
                    expected.state[target],
                )
    report = Report(parts.plan, dtype, tolerance, tuple(differences))
    if not report.ok:
        report = replace(report, first=_first_difference(parts, batch, start, tolerance))
    return report


# ---------------------------------------------------------------- one device


@dataclass
class _Run:
    losses: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]


@contextlib.contextmanager
def _reference_mode(dtype: torch.dtype) -> Iterator[None]:
    with widened_eager() if dtype == torch.float64 else contextlib.nullcontext():
        yield


def _reference(
    model: torch.nn.Module,
    batch: Any,
    loss: Loss,
    graph: Graph,
    cast: Callable[[torch.Tensor], torch.Tensor],
    factory: Callable[[Any], Any],
) -> _Run:
    """Plain eager PyTorch on a copy of the model. Dropout masks are the exact ones, number by number."""
    twin = _copy_cast(model, cast)
    parameters = [p for p in twin.parameters() if p.requires_grad]
    optimizer = factory(parameters) if parameters else None
    run = _Run([], {}, {})
    for step in range(STEPS):
        for parameter in twin.parameters():
            parameter.grad = None
        with reference_dropout(seed=0, step=step):
            value = loss(twin, batch)
        if value.requires_grad:
            value.backward()
        run.losses.append(value.detach())
        if step == 0:
            run.gradients = {n: p.grad.clone() for n, p in twin.named_parameters() if p.grad is not None}
        if optimizer is not None:
            optimizer.step()
    run.state = {n: p.detach() for n, p in twin.named_parameters(remove_duplicate=False)}
    run.state |= {n: b.detach() for n, b in twin.named_buffers(remove_duplicate=False)}
    return run


def _copy_cast(model: torch.nn.Module, cast: Callable[[torch.Tensor], torch.Tensor]) -> torch.nn.Module:
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for module in twin.modules():
            for parameter in module.parameters(recurse=False):
                parameter.data = cast(parameter.data)
            for name, buffer in module.named_buffers(recurse=False):
                module.register_buffer(
                    name,
                    cast(buffer),
                    persistent=name not in getattr(module, "_non_persistent_buffers_set", ()),
                )
    return twin


def _caster(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    narrow = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    return lambda x: x.to(dtype) if x.dtype in narrow else x


def _names(graph: Graph) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {"parameter": {}, "buffer": {}}
    for entry in graph.inputs:
        if entry.role in found:
            found[entry.role][entry.target] = entry.name
    return found


# ---------------------------------------------------------------- simulated ranks


def simulated_rank(comm: SimulatedRank) -> Rank:
    """A rank for proofs: on the CPU, random operators in their exact mode."""
    return Rank(comm, torch.device("cpu"), seed=0, exact=True)


def _simulate(
    parts: Partition, batch: Any, start: Mapping[str, torch.Tensor], factory: Callable[[Any], Any]
) -> list[_Run]:
    given = dict(leaves(batch))

    def body(comm: SimulatedRank) -> _Run:
        mine = {k: v.clone() for k, v in start.items()}
        step = LocalStep(parts, simulated_rank(comm), mine, factory)
        run = _Run([], {}, {})
        run.gradients = {}
        for number in range(STEPS):
            run.losses.append(step(given))
            if number == 0:
                run.gradients = {n: p.grad.clone() for n, p in step.parameters.items() if p.grad is not None}
        run.state = {name: leaf.detach().clone() for name, leaf in step.leaves.items()}
        return run

    return SimulatedWorld(parts.plan.mesh).run(body)


@dataclass
class _Comparison:
    parts: Partition
    ranks: list[Any]
    differences: list[Difference]

    def whole(self, what: str, values: list[torch.Tensor], expected: torch.Tensor) -> None:
        """A value that every rank holds whole."""
        self.differences.append(Difference(what, max(relative_error(v, expected) for v in values)))

    def split(self, what: str, name: str, values: list[torch.Tensor | None], expected: torch.Tensor) -> None:
        """A value that the ranks hold by its layout."""
        layout = self.parts.resharded.layouts[name]
        if any(v is None for v in values):
            self.differences.append(Difference(what, float("inf"), "a rank has none"))
            return
        errors = [0.0]
        mesh = self.parts.plan.mesh
        for rank, value in enumerate(values):
            assert value is not None
            errors.append(relative_error(value, take(expected, layout, mesh, rank), expected))
        self.differences.append(Difference(what, max(errors)))


def take(whole: torch.Tensor, layout: TensorLayout, mesh: Mesh, rank: int) -> torch.Tensor:
    """What a rank holds of a whole tensor."""
    indices = layout.indices(mesh, mesh.coordinate(rank))
    for dim, index in enumerate(indices):
        if len(index) != whole.shape[dim]:
            whole = whole.index_select(dim, torch.from_numpy(index))
    return whole


def relative_error(
    value: torch.Tensor, expected: torch.Tensor, scale_of: torch.Tensor | None = None
) -> float:
    """Largest difference over the largest magnitude expected (at least 1e-3, so that zeros do not divide)."""
    if value.shape != expected.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    scale = (
        (expected if scale_of is None else scale_of).detach().abs().max().double().item()
        if expected.numel()
        else 1.0
    )
    difference = (value.detach().double() - expected.detach().double()).abs().max().item()
    return difference / max(scale, 1e-3)


# ---------------------------------------------------------------- the first difference


def _first_difference(
    parts: Partition, batch: Any, start: Mapping[str, torch.Tensor], tolerance: float
) -> str:
    """The first value of the program, and then the last gradient, that differs from the program on one device.

    Looks at the first step, and, where all agrees there (a bias may start at zero), at parameters moved at random.
    """
    generator = torch.Generator().manual_seed(0)
    moved = {
        k: v + 0.1 * torch.randn(v.shape, generator=generator, dtype=v.dtype) if v.is_floating_point() else v
        for k, v in start.items()
    }
    return (
        _first_at(parts, batch, start, tolerance)
        or _first_at(parts, batch, moved, tolerance)
        or "every node agrees forward and backward; "
        "the difference is in the reduction of a leaf's gradient or in the update"
    )


def _first_at(parts: Partition, batch: Any, start: Mapping[str, torch.Tensor], tolerance: float) -> str:
    graph = parts.resharded.graph
    recorded = list(graph.nodes)
    kept = tuple(v for n in recorded for v in n.values)
    alone = _single(parts)
    given = dict(leaves(batch))
    expected, expected_grads = _record(alone, given, start, set(kept) & set(alone.resharded.graph.types))[0]
    found = _record(parts, given, start, set(kept))
    mesh = parts.plan.mesh
    for node in graph.nodes:
        for value in node.values:
            source = value if value in expected else node.uses[0] if node.uses else ""
            if source not in expected:
                continue
            error = _assembled_error(
                [f[0].get(value) for f in found],
                parts.resharded.layouts[value].forward,
                mesh,
                expected[source],
            )
            if error > tolerance * 10:
                return f"%{value} = {node.op} differs forward by {error:.2g}  {node.where}"
    for node in reversed(graph.nodes):
        for value in node.values:
            if value not in expected_grads:
                continue
            error = _assembled_error(
                [f[1].get(value) for f in found],
                parts.resharded.layouts[value].backward,
                mesh,
                expected_grads[value],
            )
            if error > tolerance * 10:
                return f"the gradient of %{value} = {node.op} differs by {error:.2g}  {node.where}"
    return ""


def _single(parts: Partition) -> Partition:
    from meshwright.partition import partition
    from meshwright.search.modes import make_plan

    graph = replace_reshards(parts)
    return partition(graph, make_plan(graph, Mesh.of(ranks=1), "stand_alone"))


def replace_reshards(parts: Partition) -> Graph:
    """The graph of a partition without its reshards: what one device runs."""
    graph = parts.resharded.graph
    alias: dict[str, str] = {}
    nodes = []
    for node in graph.nodes:
        if node.op == "meshwright.reshard":
            alias[node.name] = alias.get(node.uses[0], node.uses[0])
        else:
            nodes.append(node.with_uses(alias.get(u, u) for u in node.uses))
    rename = lambda pairs: tuple((k, alias.get(v, v)) for k, v in pairs)  # noqa: E731
    return replace(
        graph, nodes=tuple(nodes), outputs=rename(graph.outputs), mutations=rename(graph.mutations)
    )


def _record(
    parts: Partition, given: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor], wanted: set[str]
) -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Per rank: every wanted value, and the gradients of those that have one."""

    def body(comm: SimulatedRank) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        rank = simulated_rank(comm)
        step = LocalStep(parts, rank, {k: v.clone() for k, v in start.items()}, None)
        names = [v for n in step.graph.nodes for v in n.values if v in wanted]
        graph = replace(
            step.graph, outputs=(("loss", step.graph.loss), *((n, n) for n in names)), mutations=()
        )
        module = build_module(graph, rank, Handle(comm))
        leaf = {**step.leaves, **step.local_batch(given)}
        loss, *values = module(*(leaf[i.name] for i in graph.inputs))
        graded = [(n, v) for n, v in zip(names, values, strict=True) if v.requires_grad]
        gradients: tuple[torch.Tensor | None, ...] = ()
        if graded and loss.requires_grad:
            gradients = torch.autograd.grad(loss, [v for _, v in graded], allow_unused=True)
        forward = {n: v.detach() for n, v in zip(names, values, strict=True)}
        return forward, {n: g for (n, _), g in zip(graded, gradients, strict=False) if g is not None}

    return SimulatedWorld(parts.plan.mesh).run(body)


def _assembled_error(
    values: list[torch.Tensor | None], layout: TensorLayout, mesh: Mesh, expected: torch.Tensor
) -> float:
    """The error of a value that the ranks hold by a layout; pending terms are added first."""
    if any(v is None for v in values):
        return float("inf") if any(v is not None for v in values) else 0.0
    total: dict[int, torch.Tensor] = {}
    for rank, value in enumerate(values):
        assert value is not None
        key = min(mesh.group(rank, layout.pending)) if layout.pending else rank
        total[key] = total[key] + value.double() if key in total else value.double()
    return max(relative_error(v, take(expected, layout, mesh, r), expected) for r, v in total.items())
