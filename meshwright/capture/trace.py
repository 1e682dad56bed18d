"""Run torch.export on the loss, so that nothing the user wrote is dropped silently.

Parameters stay as they are (real, fake or meta); export computes on fake tensors only. A torch function mode runs
along, because a block that export drops or moves would change the meaning of the program:

- A result computed without gradient gets an explicit `detach`: inlined plainly, a frozen target network would train.
- An autocast context around the call is applied again inside the traced function, where export sees it.
- A user's `checkpoint()` gives a remark, a custom `autograd.Function` an error (its backward would be dropped).
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.fx import traceback as fx_traceback
from torch.fx.traceback import annotate, preserve_node_meta
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as torch_checkpoint

from meshwright.capture.as_in_eager import as_in_eager
from meshwright.capture.copy_layers import PREFIX, UnequalLayersError, copy_layers
from meshwright.capture.effects import Effects
from meshwright.capture.equal_layers import EqualLayers
from meshwright.capture.export_errors import AS_IT_IS, a_size_of_values, explained, own_error_in
from meshwright.capture.functional import is_functional, make_functional
from meshwright.capture.hooks import check_backward_hooks
from meshwright.capture.in_place import name_casts
from meshwright.capture.meta_init_record import TORCH_ROOT, user_line
from meshwright.capture.nest import Shape, count, shape_of
from meshwright.capture.outside import OutsideCalls
from meshwright.capture.past_autograd import PastAutograd, refuse_to_forget
from meshwright.capture.pytree import leaves, rebuild, without_aliases
from meshwright.capture.quiet import without_dumps
from meshwright.capture.stand_ins import cumulative_norms, stand_in
from meshwright.capture.ties import drop_unread_names, ties_of
from meshwright.core.graph import LOSS
from meshwright.errors import CaptureError, MeshwrightError

# torch.export patches classes and has state of the process, so one thread traces at a time.
ONE_AT_A_TIME = threading.RLock()
CHECKPOINT_FILE = torch_checkpoint.__file__
FUNCTION_FILE = inspect.getsourcefile(torch.autograd.Function) or ""
LINE = "user_line"  # what a node's own metadata calls the line that made it: torch knows those of `forward` alone
REAL = (torch.Tensor, torch.nn.Parameter)
UNROLLED = 2_000  # calls of one line that only a loop over something long makes
log = logging.getLogger("meshwright")
NO_CHECKPOINT = (
    "checkpoint() at {} has no effect on a captured program and does not change its numbers; "
    "to recompute activations use mw.recompute(module), recompute= of mw.plan, or leave it to the search"
)


@dataclass
class Trace:
    """The result of an export.

    `paths` are the batch's tensors in placeholder order, `origins` the source lines of nodes inside blocks, by name.
    `labels`: the names of results. `outside`: lines that read tensors which require gradients and are not the model's.
    """

    program: torch.export.ExportedProgram
    paths: tuple[str, ...]
    origins: dict[str, dict[str, Any]]
    notes: tuple[str, ...]
    labels: tuple[str, ...] = (LOSS,)
    outside: tuple[str, ...] = ()
    shape: Shape | None = None


class Loss(torch.nn.Module):
    """`loss(model, batch)` as a module over the batch's tensors."""

    def __init__(
        self, model: torch.nn.Module, batch: Any, loss: Callable[..., torch.Tensor], each: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.train(model.training)
        self.effects = Effects(model, loss)
        self.watch = _Watch(self.effects.calls, each=each)
        self.batch, self.loss, self.autocast = batch, loss, _ambient_autocast()
        self.ties = [[PREFIX + n for n in names] for names in ties_of(model).values()]

    def train(self, mode: bool = True) -> Loss:
        """Leave the model's own training flags: a user may freeze some of its modules in eval mode."""
        self.training = mode
        return self

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the results, after it has run."""
        return (LOSS, *(f"out{number}" for number in range(count(self.watch.shape or {"plain": None}))))

    def value(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """Return the result of the user's function for the batch's tensors."""
        with ExitStack() as stack:
            for device, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype))
            stack.enter_context(self.effects.inside())
            stack.enter_context(cumulative_norms(self.model))
            stack.enter_context(self.watch)
            if not self.watch.each:
                with self.watch.paused():
                    self.watch.layers = EqualLayers(self, self.effects.is_unchanged, self.watch.paused)
                stack.enter_context(self.watch.layers.watched())
            return self.loss(self.model, rebuild(self.batch, tensors))

    def forward(self, *tensors: torch.Tensor) -> Any:
        """Return the loss as a scalar, whatever the shape of its one element, and the tensors beside it, which train
        nothing.

        Raises CaptureError if it is not a loss.
        """
        loss, more = loss_and_more(self.value(tensors))
        self.watch.past.read([loss])
        made: list[torch.Tensor] = []
        self.watch.shape = None if more is None else shape_of(more, made)
        if any(result is given for result in made for given in tensors):
            raise CaptureError(
                "a result next to the loss is an unchanged tensor of the batch",
                why="there is nothing to compute",
                hint="leave it out of what the loss function returns",
            )
        return (loss, *(result.detach() for result in made)) if more is not None else loss


def loss_and_more(value: Any) -> tuple[torch.Tensor, Any]:
    """Return the loss as a scalar, and the outputs of ``(loss, outputs)``, or None. Raises CaptureError."""
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], torch.Tensor):
        return scalar_of(value[0]), value[1]
    return scalar_of(value), None


def scalar_of(value: Any) -> torch.Tensor:
    """Return the result of a user's function as a scalar loss. Raises CaptureError as ``backward()`` would."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point():
        return value.reshape(())
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        shown, hint = f"a tensor of shape {list(value.shape)} of {kind}", "reduce it, as with .mean()"
        if value.numel() == 1:
            hint = "a real floating dtype, as with .float() or .abs()"
    elif isinstance(getattr(value, "loss", None), torch.Tensor):
        shown = f"{type(value).__name__}, an object with the loss in it"
        hint = "return what is in it: lambda model, batch: model(**batch).loss"
    else:
        shown, hint = type(value).__name__, "return a tensor of one element, or (loss, outputs)"
    raise CaptureError(
        "the loss is not a scalar tensor", why=f"loss(model, batch) returned {shown}", hint=hint
    )


@dataclass
class _Watch(TorchFunctionMode):
    """Sees every torch call of the model during the trace."""

    calls: OutsideCalls = field(default_factory=OutsideCalls)
    checkpoints: list[str] = field(default_factory=list)
    # Lines that read a trainable tensor which is none of the model's.
    outside: list[str] = field(default_factory=list)
    # The nest of what is returned beside the loss: export puts attributes of modules back.
    shape: Shape | None = None
    each: bool = False  # whether each of equal layers is traced
    past: PastAutograd = field(default_factory=PastAutograd)
    layers: EqualLayers | None = None
    looks: bool = True
    ran: Counter[str] = field(default_factory=Counter[str])  # how often each line called torch

    def __post_init__(self) -> None:
        super().__init__()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Look at no call, for as long as it is not the model's."""
        self.looks = False
        try:
            with self.calls.paused():
                yield
        finally:
            self.looks = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.looks:
            return func(*args, **(kwargs or {}))
        return self.calls.aside(self._watched, func, args, kwargs or {})

    def _watched(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        self._look_up_the_stack()
        self._look_at(args)
        if func in GRADIENT_CALLS:
            _refuse_gradient_call(func)
        if func in DATA and type(args[0]) not in REAL:
            _refuse_data()
        refuse_to_forget(func, args, kwargs)

        line = user_line(code=True)
        self.ran[line] += 1
        if line and self.ran[line] == UNROLLED:
            _warn_of_loop(line)

        def made(*args: Any, **kwargs: Any) -> Any:
            with annotate({LINE: line}):
                return stand_in(func, args, kwargs)(*args, **kwargs)

        return self.past.call(func, made, args, kwargs)

    def _look_at(self, args: Any) -> None:
        """Record real tensors: parameters and buffers of the model are fake during the trace."""
        if torch.is_grad_enabled() and any(type(x) in REAL and x.requires_grad and x.is_leaf for x in args):
            line = _line_of(_out_of_torch(sys._getframe(4)))
            if line not in self.outside:
                self.outside.append(line)

    def _look_up_the_stack(self) -> None:
        frame = inspect.currentframe()
        frame = frame.f_back if frame else None
        inner: Any = None
        while frame is not None:
            code = frame.f_code
            if code.co_filename == CHECKPOINT_FILE and code.co_name == "checkpoint":
                line = _line_of(_out_of_torch(frame))
                if line not in self.checkpoints:
                    self.checkpoints.append(line)
            if code.co_filename == FUNCTION_FILE and code.co_name == "apply" and inner is not None:
                _refuse_custom_backward(frame, inner)
            if (
                code.co_name == "forward"
                and code.co_filename.startswith(TORCH_ROOT)
                and "export" in code.co_filename
            ):
                return
            inner, frame = frame, frame.f_back


GRADIENT_CALLS = {
    torch.Tensor.register_hook: "g * 2 in a hook is y * 2 - y.detach() in the model; clipping is clip_norm=",
    torch.Tensor.register_post_accumulate_grad_hook: "what a gradient becomes is the optimizer's, or clip_norm=",
    torch.Tensor.retain_grad: "make it a parameter, or compare gradients on one device",
    torch.Tensor.backward: "return the sum of the losses: the step goes backward by itself",
    torch.autograd.backward: "return the sum of the losses: the step goes backward by itself",
    torch.autograd.grad: "mw.manual_step(model, optimizer, loss=…, mesh=…) runs the model as it is, data parallel",
}


def _refuse_gradient_call(func: Any) -> None:
    raise CaptureError(
        f"{func.__name__}() inside the loss cannot be captured",
        why="a captured program has the forward pass; what is done to gradients on the way would be lost",
        where=user_line(),
        hint=GRADIENT_CALLS[func],
    )


DATA = (torch.Tensor.data.__get__, torch.Tensor.data.__set__)  # pyright: ignore[reportAttributeAccessIssue]


def _refuse_data() -> None:
    raise CaptureError(
        ".data inside the loss cannot be captured",
        why="export makes what it reads a constant, and loses what is written",
        where=user_line(),
        hint=f"x.detach() has the same values; clamp weights after a step, not in the model; or {AS_IT_IS}",
    )


def _warn_of_loop(line: str) -> None:
    """Say early why a capture takes minutes."""
    log.warning(
        "%s has called torch %s times: a loop is captured step by step, which takes minutes for thousands of steps; "
        "a shorter sequence is captured and planned sooner",
        line.split()[0],
        f"{UNROLLED:,}",
    )


def _out_of_torch(frame: Any) -> Any:
    while frame.f_back is not None and frame.f_code.co_filename.startswith(TORCH_ROOT):
        frame = frame.f_back
    return frame


def _line_of(frame: Any) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _refuse_custom_backward(frame: Any, inner: Any) -> None:
    reentrant = inner.f_code.co_filename == CHECKPOINT_FILE
    raise CaptureError(
        "checkpoint(use_reentrant=True) cannot be captured"
        if reentrant
        else "a custom autograd.Function cannot be captured",
        why="its backward is not captured and would be dropped silently",
        where=_line_of(_out_of_torch(frame)),
        hint="checkpoint(..., use_reentrant=False), or mw.recompute(module)"
        if reentrant
        else f"{AS_IT_IS}; or, in code of your own, register it with torch.library.custom_op and register_autograd, "
        "and give it a rule with mw.rule",
    )


def _ambient_autocast() -> tuple[tuple[str, torch.dtype], ...]:
    kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


def trace(model: torch.nn.Module, batch: Any, loss: Callable[..., Any], wrap: type[Loss] = Loss) -> Trace:
    """Export `loss(model, batch)` and make it functional. `wrap` is the class of the wrapper. Raises CaptureError."""
    check_backward_hooks(model)
    try:
        return _trace(model, batch, loss, wrap, each=False)
    except UnequalLayersError:
        return _trace(model, batch, loss, wrap, each=True)


def _trace(
    model: torch.nn.Module, batch: Any, loss: Callable[..., Any], wrap: type[Loss], each: bool
) -> Trace:
    found = list(leaves(batch))
    paths, tensors = tuple(p for p, _ in found), without_aliases(t for _, t in found)
    with ONE_AT_A_TIME, warnings.catch_warnings(), torch.enable_grad(), without_dumps(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        stack.enter_context(as_in_eager())
        wrapper = wrap(model, batch, loss, each)
        for device, _ in wrapper.autocast:  # it is applied again inside the traced function
            stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(wrapper.effects.around())
        fx_traceback.current_meta.pop("custom", None)  # what a capture in another thread may have left
        try:
            with preserve_node_meta():  # for what `_Watch` notes
                program = torch.export.export(wrapper, tuple(tensors), strict=False)
                if wrapper.watch.layers is not None:
                    copy_layers(program, wrapper.watch.layers, wrapper.ties)
                origins = _origins(program.graph_module)
                if is_functional(program):
                    make_functional(program)
                else:
                    name_casts(program.graph_module)
                    drop_unread_names(program, wrapper.ties)
                    program = _decomposed(program)
        except (MeshwrightError, UnequalLayersError):
            raise
        except Exception as error:
            nested = own_error_in(error)
            raise nested or explained(error, model, batch, loss) from error
    notes = (
        *(NO_CHECKPOINT.format(line) for line in wrapper.watch.checkpoints),
        *wrapper.effects.left.notes,
    )
    outside = tuple(wrapper.watch.outside)
    return Trace(
        program, paths, origins, notes, labels=wrapper.labels, outside=outside, shape=wrapper.watch.shape
    )


def _decomposed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Decompose a program. Raises CaptureError, with the line that made it, for a size that an operator refuses."""
    try:
        return program.run_decompositions({})
    except Exception:
        modules = (m for m in program.graph_module.modules() if isinstance(m, torch.fx.GraphModule))
        for node in (node for module in modules for node in module.graph.nodes):
            made = node.meta.get("val")
            if isinstance(made, torch.Tensor) and not all(type(size) is int for size in made.shape):
                raise a_size_of_values(node.meta.get("custom", {}).get(LINE, "")) from None
        raise


def _origins(module: torch.nn.Module) -> dict[str, dict[str, Any]]:
    """Return the source lines of nodes inside blocks (no_grad, autocast); decomposition has generated code only."""
    known: dict[str, dict[str, Any]] = {}
    for inner in module.modules():
        if isinstance(inner, torch.fx.GraphModule) and inner is not module:
            known |= {
                n.name: n.meta
                for n in inner.graph.nodes
                if n.op == "call_function" and n.meta.get("stack_trace")
            }
    return known
