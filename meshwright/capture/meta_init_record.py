"""Record what a constructor does to its tensors, while it runs on the meta device.

A model is built without memory: every tensor that its constructor creates is a meta tensor, and computations are
recorded as a list of calls. `meta_init_replay.py` runs them later, for one parameter at a time. Tensors are identified
by storage, so views, ties and ``.data`` need no care: a tensor is a view of a storage.

If a constructor needs a number (``x.item()``), its dependences are computed at once. That is refused for random values,
since random numbers are drawn in the order of one device, which is known only at the end.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.capture.pytree import leaves, map_leaves
from meshwright.errors import CaptureError, MeshwrightError

TORCH_ROOT = str(Path(torch.__file__).parent)
HERE = str(Path(__file__).parent)
META = torch.device("meta")

# Draw as many random numbers whatever their tensors hold, so one whose result is overwritten may fill any memory.
DRAWN = frozenset(
    "uniform_ normal_ random_ exponential_ log_normal_ cauchy_ geometric_ bernoulli_ kaiming_uniform_ "
    "trunc_normal_ orthogonal_ sparse_ rand randn randint randperm rand_like randn_like randint_like".split()
)
# Draw nothing: they run when they are needed, or not at all. Any other call runs where it stood.
PLAIN = frozenset(
    "zero_ fill_ zeros_ ones_ constant_ dirac_ copy_ mul_ add_ sub_ div_ clamp_ clamp_min_ clamp_max_ erfinv_ arange "
    "empty empty_like new_empty new_tensor zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full "
    "__setitem__ tensor clone contiguous to type half float double bfloat16 mul add sub div requires_grad_".split()
)
# Give every element of their first tensor a value and read none of it.
OVERWRITES = frozenset(
    "uniform_ normal_ random_ exponential_ log_normal_ cauchy_ geometric_ bernoulli_ kaiming_uniform_ "
    "trunc_normal_ orthogonal_ sparse_ zero_ fill_ zeros_ ones_ constant_ dirac_ copy_".split()
)


@dataclass(frozen=True, slots=True)
class View:
    """A tensor as a view of a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


@dataclass(slots=True)
class Call:
    """One call of torch.

    Tensors among its arguments are `View`s. `makes` are the results in new memory, by position. `overwrites`: the
    storage that it fills without reading; `asks`: storages of which it needs only shape and dtype. `state`: the random
    state that the constructor had set before, if it did.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    overwrites: int | None = None
    asks: frozenset[int] = frozenset()
    makes: dict[int, View] = field(default_factory=dict)
    state: torch.Tensor | None = None

    @property
    def touches(self) -> frozenset[int]:
        """All storages it reads or writes."""
        return self.reads | self.writes | {v.storage for v in self.makes.values()}

    @property
    def plain(self) -> bool:
        """True if it draws nothing."""
        return self.function.__name__ in PLAIN

    @property
    def drawn(self) -> bool:
        """True if it draws random numbers, as many whatever the tensors hold."""
        return self.function.__name__ in DRAWN


class Construction(TorchFunctionMode):
    """Within this context models are built without memory, and operations on their tensors are recorded in `calls`.

    `nbytes`: size of each storage. `constants`: tensors from elsewhere (a file, numpy), by their storage.
    """

    def __init__(self, evaluate: Callable[[Construction, View], torch.Tensor]) -> None:
        """`evaluate` computes the values of a tensor from the calls so far."""
        super().__init__()
        self.calls: list[Call] = []
        self.nbytes: list[int] = []
        self.constants: dict[int, torch.Tensor] = {}
        self.evaluate = evaluate
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # kept alive, so that no two have one id
        self._twins: dict[int, torch.Tensor] = {}
        self._state = torch.get_rng_state()
        self.end: torch.Tensor | None = None

    def view(self, tensor: torch.Tensor) -> View:
        """Return a tensor as a view of a storage."""
        if tensor.layout != torch.strided:
            raise _refused(f"a {tensor.layout} tensor", "its values lie in no one stretch of memory")
        storage = tensor.untyped_storage()
        number = self._numbers.get(id(storage))
        if number is None:
            number = self._numbers[id(storage)] = len(self.nbytes)
            self._storages.append(storage)
            self.nbytes.append(storage.nbytes())
            if storage.device.type != "meta":
                self.constants[number] = tensor.detach()
        return View(number, tensor.dtype, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))

    def finish(self) -> None:
        """Record the final state of the random generator."""
        self.end = self._reseeded()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.__name__, dict(kwargs or {})
        if name == "__get__":
            return self._read(func, args)
        if name == "__set__":
            return func(*args, **kwargs)
        if name in ("cpu", "cuda", "pin_memory"):
            return args[0]
        if kwargs.get("generator") is not None:
            raise _own_generator(name)
        kwargs.pop("device", None)
        if name == "to":
            args = tuple(a for a in args if not isinstance(a, str | torch.device))
            if len(args) == 1 and not kwargs:
                return args[0]
        given = list(dict.fromkeys(t for _, t in leaves((args, kwargs))))
        views = {id(t): self.view(t) for t in given}
        meta = {id(t): self._twin(t) for t in given}
        here = map_leaves((tuple(args), kwargs), lambda t: meta[id(t)])
        try:
            with META:
                out = func(*here[0], **here[1])
        except MeshwrightError:
            raise
        except Exception as error:
            return self._number(func, args, kwargs, given, error)
        outputs = [t for _, t in leaves(out)]
        self._note(func, args, kwargs, views, given, meta, outputs, out is None)
        back = {id(meta[id(t)]): t for t in given}
        return map_leaves(out, lambda t: back.get(id(t), t))

    def _note(
        self,
        func: Any,
        args: Any,
        kwargs: dict[str, Any],
        views: Mapping[int, View],
        given: list[torch.Tensor],
        meta: Mapping[int, torch.Tensor],
        outputs: list[torch.Tensor],
        nothing: bool,
    ) -> None:
        reads = {v.storage for v in views.values()}
        same = {id(t) for t in outputs}
        written = {views[id(t)].storage for t in given if nothing or id(meta[id(t)]) in same}
        makes: dict[int, View] = {}
        for number, tensor in enumerate(outputs):
            known = id(tensor.untyped_storage()) in self._numbers
            if not known:
                makes[number] = self.view(tensor)
        if not written and not makes:
            return
        if written & set(self.constants) and func.__name__ != "requires_grad_":
            raise _refused(
                f"{func.__name__} on a tensor that came from elsewhere",
                "torch.Tensor(sizes), numpy and files give memory of their own, in which nothing is followed",
                "torch.empty(sizes), or copy_ it into a parameter",
            )
        plain_args, plain_kwargs = map_leaves((tuple(args), kwargs), lambda t: views[id(t)])
        call = Call(func, plain_args, plain_kwargs, torch.get_default_dtype(), makes=makes)
        call.writes = frozenset(written)
        first = kwargs.get("tensor", args[0] if args else None)  # torch.nn.init names its own
        if func.__name__ in OVERWRITES and isinstance(first, torch.Tensor):
            view = views[id(first)]
            others = {views[id(t)].storage for t in given if t is not first}
            whole = first.numel() * first.element_size() == self.nbytes[view.storage]
            if whole and view.storage not in others:
                call.overwrites = view.storage
        if func.__name__.startswith("new_") or func.__name__.endswith("_like"):
            call.asks = frozenset(reads)
        call.reads = frozenset(reads - {call.overwrites} - call.asks)
        if not call.plain:
            call.state = self._reseeded()
        self.calls.append(call)

    def _reseeded(self) -> torch.Tensor | None:
        state = torch.get_rng_state()
        if torch.equal(state, self._state):
            return None
        self._state = state
        return state

    def _read(self, func: Any, args: Any) -> Any:
        """Return an attribute of a tensor, as if it were on the CPU, where it will be."""
        match getattr(func.__self__, "__name__", ""):
            case "device":
                return torch.device("cpu")
            case "is_meta":
                return self._noted_whole()
            case "is_cuda":
                return False
            case "is_cpu":
                return True
        return func(*args)

    def _noted_whole(self) -> bool:
        """Return whether the caller is a function of `torch.nn.init` that does nothing for a meta tensor.

        Such a function is recorded as one call, since some of them look at the numbers they draw.
        """
        inside = [f for f in frames() if f.f_code.co_filename == torch.nn.init.__file__]
        if not inside:
            return False
        frame = inside[-1]
        function = getattr(torch.nn.init, frame.f_code.co_name)
        given = {name: frame.f_locals[name] for name in inspect.signature(function).parameters}
        if given.pop("generator", None) is not None:
            raise _own_generator(function.__name__)
        tensor = given.pop("tensor")
        views, same = {id(tensor): self.view(tensor)}, {id(tensor): tensor}
        self._note(function, (tensor,), given, views, [tensor], same, [tensor], False)
        return True

    def _twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the meta device."""
        if tensor.device.type == "meta":
            return tensor
        view = self.view(tensor)
        storage = tensor.untyped_storage()
        if id(storage) not in self._twins:
            twin = torch.empty(storage.nbytes(), dtype=torch.uint8, device=META)
            self._twins[id(storage)] = twin
            self._storages.append(twin.untyped_storage())
            self._numbers[id(twin.untyped_storage())] = view.storage
        memory = self._twins[id(storage)].untyped_storage()
        return torch.empty(0, dtype=view.dtype, device=META).set_(memory, view.offset, view.size, view.stride)

    def _number(
        self, func: Any, args: Any, kwargs: dict[str, Any], given: list[torch.Tensor], error: Exception
    ) -> Any:
        """Return the result of a call that needs values: ``x.item()``, ``if x.sum() > 0``."""
        name = func.__name__
        writes = name == "__setitem__" or "out" in kwargs or (name[-1] == "_" and name[-2:] != "__")
        if not given or writes:
            raise error
        values = {id(t): self.evaluate(self, self.view(t)) for t in given}
        args, kwargs = map_leaves((tuple(args), kwargs), lambda t: values[id(t)])
        with torch.no_grad():
            out = func(*args, **kwargs)
        if any(True for _ in leaves(out)):
            raise error
        return out


def _refused(what: str, why: str, hint: str = "") -> CaptureError:
    return CaptureError(
        f"init: {what} cannot be made shard by shard",
        why=why,
        where=user_line(),
        hint=hint or "build the model on a real device and leave out init=",
    )


def _own_generator(name: str) -> CaptureError:
    return _refused(f"{name} with a generator of its own", "only the CPU's default one is followed")


def user_line(code: bool = False) -> str:
    """Return the innermost line that is neither torch's nor ours, with its `code` if requested."""
    for frame in frames():
        file = frame.f_code.co_filename
        if not file.startswith((TORCH_ROOT, HERE, "<")):
            text = f"  {linecache.getline(file, frame.f_lineno).strip()}" if code else ""
            return f"{Path(file).name}:{frame.f_lineno}{text}"
    return ""


def frames() -> Iterator[Any]:
    """Yield the stack from inside out."""
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back
