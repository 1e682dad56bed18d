"""`forward_step`: what a model gives, without gradients, under any plan: for inference, and for evaluation on the
weights that a training step holds."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Unpack

import torch

from meshwright import heartbeat
from meshwright.capture.forward import Forward, filled
from meshwright.capture.meta_init import Init, check_absent, check_weights, temporary_of
from meshwright.capture.pytree import leaves, literals
from meshwright.checkpoint.weights import agree_on_path, named_path, open_weights, read_weights
from meshwright.checks.guards import Guards
from meshwright.checks.input_checks import check_capturable, check_ranks, check_switches, plan_from
from meshwright.checks.model_checks import check_function
from meshwright.checks.rank_agreement import device_of, over_gloo, own_device, prepare, source_of
from meshwright.compile import plan_captured, values_of
from meshwright.core.graph import Graph
from meshwright.core.layout import TensorLayout
from meshwright.core.techniques import TECHNIQUES, Options, Techniques, options_beside
from meshwright.cost.cluster import Cluster
from meshwright.errors import BatchError, PlanError, RunError
from meshwright.inference.forward_program import Outputs, agree_on_program, lowered, opened_weights
from meshwright.loss.evaluation import kept_modes
from meshwright.partition import Partition
from meshwright.plan.plan import Plan
from meshwright.planning.in_pieces import in_pieces
from meshwright.planning.search_request import request_for
from meshwright.report.program import ProgramText
from meshwright.runtime.communicator import Communicator
from meshwright.runtime.equal_start import start_equal
from meshwright.runtime.forward import LocalForward, leaves_of
from meshwright.runtime.local_batch import LocalBatch
from meshwright.runtime.parameter_offload import HostParameters
from meshwright.runtime.rank import Rank
from meshwright.runtime.rendezvous import Meeting, check_world
from meshwright.runtime.shard_access import ShardAccess
from meshwright.search.reuse import carried
from meshwright.search.wanted import MeshLike, Pins
from meshwright.user_module.hollow import check_has_values

PROGRAMS = 16  # of other shapes that a forward step keeps


def default_outputs(model: Any, batch: Any) -> Any:
    """``model(**batch)`` for a mapping (as Hugging Face models are called), else ``model(batch)``."""
    return model(**batch) if isinstance(batch, Mapping) else model(batch)


class ForwardStep:
    """A forward step, returned by `mw.forward_step`: ``results = forward(batch)``.

    Attributes for inspection: `plan`, `program` (print it), and `layouts`, the layout of each tensor of the results, in
    order.
    """

    def __init__(
        self,
        local: LocalForward,
        parts: Partition,
        shape: Any,
        graph: Graph,
        guards: Guards | dict[str, Any],
        again: Callable[[Any], ForwardStep | None] = lambda _: None,
        access: ShardAccess | None = None,
    ) -> None:
        """`shape`: the nest of the results. `guards`: what has to be as it was; of a program from a file, what of a
        batch is no tensor. `again`: makes the same for a batch of another shape. `access`: to the shards of a step
        whose weights this reads."""
        self.local, self.parts, self.plan = local, parts, parts.requested
        self.access = access or ShardAccess(lambda: None)
        self.shape, self.graph, self._guards, self._again = shape, graph, guards, again
        self._shapes = {e.target: e.type.shape for e in local.batches.entries}
        self._others: dict[Any, ForwardStep] = {}  # by shapes, the one used last at the end

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.local.world.rank

    @property
    def layouts(self) -> tuple[TensorLayout, ...]:
        """The layout of each tensor of the results, in order. Axes in time count micro-batches."""
        return tuple(self.local.layouts.values())

    @property
    def program(self) -> ProgramText:
        """The program of this rank: print it to see every collective, with its axis and bytes."""
        local = self.local
        stages = {} if local.pipe is None else {s: local.pipe.cut[s] for s in local.pipe.mine}
        return ProgramText(local.made.graph, local.parts, [], [], local.rank.comm.rank, stages)

    def check_unchanged(self) -> None:
        """Raise RunError if the model, or a value that `outputs` reads, has changed since this step was built."""
        if isinstance(self._guards, Guards):
            self._guards.check()

    def beside(self, model: torch.nn.Module, batch: Any, outputs: Outputs = default_outputs) -> ForwardStep:
        """Build another program, for other shapes or results, on the same parameters and buffers. Every rank calls it.

        `model` is the one that this step was built from, or the same on the meta device.
        """
        local = self.local
        tag = local.executor.borders.first_free_tag + 1
        build = shared_forward(
            self.plan, local.world, local.rank, local.leaves, local.host_parameters, tag, self.access
        )
        return build(model, batch, outputs)

    def __call__(self, batch: Any, *, gather: bool = True, share: bool = True) -> Any:
        """Run the forward pass and return the results, tensors nested as `outputs` returns them. Every rank calls it.

        A batch of another shape is captured when it first occurs.

        Args:
            batch: The global batch, the same on every rank, or a shard from `mw.shard_loader`.
            gather: Every rank gets full tensors. With False it gets its shard of each (`layouts`), those of several
                micro-batches concatenated.
            share: In a pipeline, send full results to the ranks of all stages. With False, or with ``gather=False``,
                ranks that did not compute a result get None.

        Raises BatchError on all ranks.
        """
        check_switches(gather=gather, share=share)
        self._check(batch)
        given = batch if isinstance(batch, LocalBatch) else dict(leaves(batch))
        if not isinstance(given, LocalBatch) and self._is_resized(given):
            other = self._other(batch, given)
            if other is not None:
                return other(batch, gather=gather, share=share)
        with self.access.inside():
            found = self.local(given, gather=gather, share=share)
        return filled(self.shape, found.values())

    @property
    def literals(self) -> dict[str, Any]:
        """Non-tensor values of the example batch, by path: the program is specialised for them."""
        return self._guards.literals if isinstance(self._guards, Guards) else self._guards

    def _check(self, batch: Any) -> None:
        if isinstance(self._guards, Guards):
            self._guards.check(batch)
        elif not isinstance(batch, LocalBatch) and dict(literals(batch)) != self._guards:
            raise BatchError(
                f"the batch has {dict(literals(batch))} in addition to its tensors",
                why=f"the program was exported for {self._guards}, which are part of it",
                hint="export a program for each",
            )

    def _is_resized(self, given: Mapping[str, torch.Tensor]) -> bool:
        """Return whether a batch differs from the example in sizes alone."""
        dims = {path: x.dim() for path, x in given.items()}
        known = {path: len(shape) for path, shape in self._shapes.items()}
        return dims == known and any(tuple(x.shape) != self._shapes[path] for path, x in given.items())

    def _other(self, batch: Any, given: Mapping[str, torch.Tensor]) -> ForwardStep | None:
        """The program for a batch of another shape, made where there is none; None where the model is gone."""
        key = tuple((path, x.shape) for path, x in given.items())
        found = self._others.pop(key, None) or self._again(batch)
        if found is not None:
            self._others[key] = found
            if len(self._others) > PROGRAMS:
                del self._others[next(iter(self._others))]
        return found


@heartbeat.during("building a forward step", patient=True)
def forward_step(
    model: torch.nn.Module,
    batch: Any,
    *,
    outputs: Outputs = default_outputs,
    plan: Plan | str | Path | None = None,
    mesh: MeshLike = None,
    mode: str | None = None,
    pins: Pins | None = None,
    cluster: Cluster | None = None,
    seed: int = 0,
    exact_random: bool = False,
    broadcast: bool | int = True,
    weights: str | Path | None = None,
    init: Init | None = None,
    cast: bool = False,
    device: torch.device | str | None = None,
    **techniques: Unpack[Options],
) -> ForwardStep:
    """Build a step that computes ``outputs(model, batch)`` on the launched ranks without gradients. Every rank calls
    it.

    Args:
        model: A module in the mode to run in: call ``model.eval()`` before. On the meta device it needs `weights`.
        batch: An example of the global batch.
        outputs: Returns a tensor, or nested dicts, lists, tuples and dataclasses of tensors; by default
            ``model(**batch)`` for a dict and ``model(batch)`` otherwise.
        plan: A plan of this program or of a training step of the model, or the path of its file. Options of training in
            it are ignored. Without it one is made with `mesh`, `mode`, `pins`, `cluster` and `techniques`, as by
            `mw.plan`.
        seed: Seed of random operators.
        exact_random: True draws the random numbers of one device under any plan.
        broadcast: As in `mw.train_step`.
        weights: A checkpoint, a safetensors file or a Hugging Face folder. Each rank reads only its shards.
        init: A function that builds the model. It computes buffers that the file lacks and that are on the meta device.
        cast: Convert floating-point weights to the dtype of the model.
        device: The device of loaded weights; by default the CPU.

    Replicated parameters stay the tensors of `model`; of sharded ones the step keeps this rank's shard. Raises a
    subclass of MeshwrightError before a process group is made; damaged shards of a file raise later, on all ranks.
    """
    asked = options_beside(plan, techniques)
    request = request_for(cluster, None)
    check_capturable(model)
    check_has_values(model)
    check_function("outputs", outputs, 'lambda model, batch: model(batch["ids"])')
    plan = plan_from(plan)
    _check_forward(asked, mode)
    check_ranks(plan, mesh, cluster, asked)
    check_switches(cast=cast, exact_random=exact_random)
    check_weights(model, weights, {"init": init, "cast": cast, "device": device})
    source, place, meeting = source_of(broadcast), device_of(model), Meeting()
    if weights is not None:
        place = own_device(torch.device(device or "cpu"))
    agree_on_path(meeting, weights)
    temporary = temporary_of(model)

    def chosen(found: Forward) -> Plan:
        captured = found.captured
        if plan is None:
            made = plan_captured(captured, mesh, mode, pins, request, asked)
        elif plan.fingerprint == captured.graph.fingerprint:
            made = plan.check(captured.graph)
        else:
            made = carried(plan, captured.graph, captured.folding)
        check_world(made.ranks)
        return made

    def found_at(found: Forward) -> str:
        """The checkpoint that rank 0 has found, once it is the model's."""
        if weights is None:
            return ""
        path = named_path(weights)
        absent = open_weights(path, found.captured.graph.inputs, temporary, cast).absent
        check_absent(model, absent, init, path)
        return str(path)

    agreed, guards = agree_on_program(
        meeting, model, batch, outputs, chosen, found_at, source, seed=seed, exact_random=exact_random
    )
    captured, parts = lowered(agreed)
    over_gloo(meeting, parts.requested, place)
    opened, computed = None, dict[str, torch.Tensor]()
    if agreed.more["weights"]:
        opened, computed = opened_weights(meeting, model, agreed, temporary, cast, init)
    comm = meeting.connect(parts.requested.ranks, place, host=bool(parts.requested.hosts))
    prepare(comm, parts)
    values = values_of(model, captured, place)
    read = dict[str, torch.Tensor]()
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if opened is not None:
        read = read_weights(opened, meeting, parts, comm, place)
        values = {n: computed.get(n, x) for n, x in values.items() if n not in opened.names}
        named = {e.target: named[e.target] for e in opened.absent}
    start_equal(comm, place, named, source)
    rank = Rank(comm, place, seed=seed, exact=exact_random)
    mine = {**leaves_of(parts, comm, place, values), **read}
    local, held = LocalForward(parts, rank, mine), weakref.ref(model)  # its full weights may be freed
    in_mode = kept_modes(model)

    def again(example: Any) -> ForwardStep | None:
        there = held()
        if there is None:
            return None
        with in_mode(there):
            return made.beside(there, example, outputs)

    made = ForwardStep(local, parts, agreed.more["shape"], captured.graph, guards, again)
    return made


def forward(model: torch.nn.Module, batch: Any, **how: Any) -> Any:
    """Run a model once, without gradients, under any plan, and return its results. Every rank calls it.

    `gather` and `share` are those of `ForwardStep`; all other arguments are those of `forward_step`. For several
    batches of one shape, build a `forward_step` once and call it.
    """
    asked = {name: how.pop(name) for name in ("gather", "share") if name in how}
    return forward_step(model, batch, **how)(batch, **asked)


def shared_forward(
    plan: Plan,
    comm: Communicator,
    rank: Rank,
    leaves: Mapping[str, torch.Tensor],
    host_parameters: HostParameters,
    first_tag: int,
    access: ShardAccess,
) -> Callable[[torch.nn.Module, Any, Outputs], ForwardStep]:
    """`forward_step` on what the step of a plan holds on a rank: its communicator, and its tensors by the names of the
    program's inputs, with the `access` to them. Messages between stages have tags from `first_tag` on."""

    @heartbeat.during("building a forward step", patient=True)
    def build(model: torch.nn.Module, batch: Any, outputs: Outputs) -> ForwardStep:
        meeting = Meeting()

        def chosen(found: Forward) -> Plan:
            return _carried(plan, found)

        agreed, guards = agree_on_program(meeting, model, batch, outputs, chosen)
        captured, parts = lowered(agreed)
        prepare(comm, parts)
        own = {
            i.name: agreed.constants[i.target].to(rank.device) for i in captured.graph.input_of("constant")
        }
        twin = Rank(comm, rank.device, rank.seed, rank.exact)
        held = _held_by_all(meeting, parts, leaves)
        local = LocalForward(parts, twin, {**leaves, **own}, host_parameters, first_tag, held)

        in_mode = kept_modes(model)

        def again(example: Any) -> ForwardStep | None:
            with in_mode(model):
                return build(model, example, outputs)

        return ForwardStep(local, parts, agreed.more["shape"], captured.graph, guards, again, access)

    return build


def _carried(plan: Plan, found: Forward) -> Plan:
    """The plan of a training step, or of another batch, for a forward pass."""
    graph, folding = found.captured.graph, found.captured.folding
    return in_pieces(plan, graph, lambda one: carried(one, graph, folding))


def _held_by_all(
    meeting: Meeting, parts: Partition, leaves: Mapping[str, torch.Tensor]
) -> list[frozenset[str]]:
    """The parameters and buffers of a program that each rank has. Collective. Raises RunError on all ranks for one that
    is on none, or that a rank would have to lend from the host's memory."""
    graph = parts.resharded.graph
    read = {u for node in graph.nodes for u in node.uses} | {value for _, value in graph.outputs}
    entries = [e for e in graph.inputs if e.role in ("parameter", "buffer") and e.name in read]
    word = json.dumps([e.name for e in entries if e.name in leaves])
    held = [frozenset(json.loads(told)) for told in meeting.collect(word)]
    everywhere, somewhere = frozenset.intersection(*held), frozenset.union(*held)
    for entry in entries:
        if entry.name not in somewhere or (
            entry.name not in everywhere and entry.name in parts.resharded.host_parameters
        ):
            raise RunError(
                f"{entry.target} is on other ranks of the pipeline than the stage that reads it",
                hint="with step.full() as model: model(x) evaluates on the full model; or train without pipeline=",
            )
    return held


# ---------------------------------------------------------------- steps


def _check_forward(asked: Techniques, mode: str | None) -> None:
    """Raise PlanError for what has no meaning without a backward pass."""
    given = sorted(name for name in asked.non_defaults() if not TECHNIQUES[name].forward)
    given += [f"offload={word!r}" for word in asked.offload if word != "parameters"]
    given += ["micro_batches without pipeline="] if asked.micro_batches > 1 and asked.pipeline == 1 else []
    if given:
        raise PlanError(
            f"{given[0]} for a forward pass",
            why="it concerns gradients, updates, or what is kept for them"
            if "micro" not in given[0]
            else "without backward, each micro-batch can be a batch of its own",
            hint="leave it out",
        )
    if mode == "manual":
        raise PlanError('mode="manual" has no plan', hint="call the model itself, under torch.no_grad()")


__all__ = ["ForwardStep", "default_outputs", "forward", "forward_step", "shared_forward"]
