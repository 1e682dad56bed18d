"""Access of the user to a rank's shards between steps, by ``step.optimizer.param_groups`` and ``step.parameters``.

Under one plan such a tensor is the full parameter, under another a shard of it. Elementwise changes mean the same for
both, a norm does not. So a shard that a user has asked for has a class that refuses reductions over sharded dims, and
records changes that must reach the weights that programs read. Steps themselves see plain parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.errors import RunError

# Functions whose result depends on all elements along a dim → where that dim is among their arguments.
REDUCING = {
    **dict.fromkeys(
        "sum nansum mean nanmean prod amax amin max min aminmax std std_mean var var_mean median nanmedian all any "
        "argmax argmin logsumexp softmax log_softmax cumsum cumprod sort argsort topk count_nonzero unbind".split(),
        1,
    ),
    **dict.fromkeys("norm linalg_norm linalg_vector_norm normalize quantile kthvalue renorm".split(), 2),
}
# Functions of which no argument says that the sharded dim is left alone.
MIXING = frozenset(
    "matmul mm bmm mv dot vdot inner outer einsum __matmul__ __rmatmul__ addmm linear dist cdist cat concat "
    "concatenate stack hstack vstack flip roll histc bincount unique linalg_matrix_norm linalg_svd linalg_svdvals "
    "linalg_qr linalg_eigh allclose equal cosine_similarity mse_loss _foreach_norm _foreach_max get_total_norm".split()
)
HINT = (
    "clip_norm= clips by the global norm, and step.grad_norm is that; step.gradient_norms() has the norm of each "
    "gradient; to work with full values: with step.full() as model: …"
)
GET_DATA, SET_DATA = torch.Tensor.data.__get__, torch.Tensor.data.__set__  # pyright: ignore[reportAttributeAccessIssue]
GET_GRAD, SET_GRAD = torch.Tensor.grad.__get__, torch.Tensor.grad.__set__  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
SHOWN = (torch.Tensor.__repr__, torch.Tensor.__format__)
ALIASES = (GET_DATA, GET_GRAD, torch.Tensor.detach)


@dataclass
class ShardInfo:
    """Facts about a shard. `dims`: the sharded dims; `apart`: programs read another tensor, which must be updated after
    a change."""

    name: str
    dims: frozenset[int]
    apart: bool
    access: ShardAccess


@dataclass
class ShardAccess:
    """The shards of one state. `lent`: somebody has asked for them; `changed`: what they read is to be published."""

    publish: Callable[[], None]
    held: dict[int, tuple[torch.nn.Parameter, ShardInfo]] = field(default_factory=dict)
    lent: bool = False
    changed: bool = False
    _depth: int = 0

    def add(self, name: str, parameter: torch.nn.Parameter, dims: frozenset[int], apart: bool) -> None:
        """A parameter that an optimizer updates, unless it is the full one that programs read."""
        if (dims or apart) and id(parameter) not in self.held:
            self.held[id(parameter)] = parameter, ShardInfo(name, dims, apart, self)

    def lend(self) -> None:
        """From now on a user may have the shards, outside of `inside`."""
        if not self.lent:
            self.lent = True
            if not self._depth:
                self._mark(True)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Within it shards are plain parameters, and what was changed of them is where programs read it. Collective
        where something was changed."""
        before = self.enter()
        try:
            yield
        finally:
            self.leave(before)

    def enter(self) -> int:
        """Begin `inside`; what `leave` has to be given."""
        before, self._depth = self._depth, self._depth + 1
        if not before and self.lent:
            self._mark(False)
            if self.changed:
                self.changed = False
                with torch.no_grad():
                    self.publish()
        return before

    def leave(self, before: int) -> None:
        """End `inside`, and all that has begun within it and not ended."""
        self._depth = before
        if not before and self.lent:
            self._mark(True)

    def _mark(self, on: bool) -> None:
        kind = LentShard if on else torch.nn.Parameter
        for parameter, held in self.held.values():
            parameter.__class__ = kind
            if on:
                vars(parameter)["lent_as"] = held


class LentShard(torch.nn.Parameter):
    """A shard of a parameter, for a user."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `_answer`."""
        return _answer(func, super().__torch_function__, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A file, or a copy, has a plain parameter."""
        return torch.nn.Parameter(_plain(self), self.requires_grad).__reduce_ex__(protocol)


class LentView(torch.Tensor):
    """Memory of a shard, or of its gradient."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `_answer`."""
        plain = torch.nn.Parameter.__torch_function__
        return _answer(func, plain, args, kwargs or {})

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A file, or a copy, has a plain tensor."""
        return _plain(self).__reduce_ex__(protocol)


KINDS = (LentShard, LentView)


def _answer(func: Any, plain: Any, args: Any, kwargs: Any) -> Any:
    """Run a call of torch on shards. Raises RunError for a reduction over a sharded dim."""
    name = getattr(func, "__name__", "")
    lent = list(_lent(args)) + list(_lent(kwargs))
    for x in lent:
        held: ShardInfo = vars(x)["lent_as"]
        if held.dims and (
            name in MIXING or (name in REDUCING and _reaches(held.dims, x, name, args, kwargs))
        ):
            raise RunError(
                f"{name.strip('_')} of {held.name}, of which this rank has a shard",
                why="each rank would get the result of its shard, not of the full parameter",
                hint=HINT,
            )
    if func == SET_DATA and args[0].shape == args[1].shape:  # a program may read this very memory
        func, args = torch.Tensor.copy_, (plain(GET_DATA, (), (args[0],), {}), args[1])
        vars(lent[0])["lent_as"].access.changed = True
    elif func == SET_GRAD and type(args[1]) in KINDS:
        args = (args[0], _plain(args[1]))
    in_place = (
        (name.endswith("_") and not name.endswith("__")) or name.startswith("__i") or name == "__setitem__"
    )
    if in_place or "out" in kwargs:
        for x in lent:
            vars(x)["lent_as"].access.changed |= vars(x)["lent_as"].apart
    if func in SHOWN:
        return func(_plain(args[0]), *args[1:], **kwargs)
    out = plain(func, (), args, kwargs)
    if isinstance(out, tuple | list) and not isinstance(out, torch.Size):
        return type(out)(_lent_on(x, func, lent) for x in out) if type(out) in (tuple, list) else out
    return _lent_on(out, func, lent)


def _lent_on(out: Any, func: Any, lent: list[torch.Tensor]) -> Any:
    """A result as a shard, too: what is computed of one, element by element or along other dims, or its memory."""
    if not lent or type(out) is not torch.Tensor:
        return out
    source = next((x for x in lent if vars(x)["lent_as"].dims), lent[0])
    held: ShardInfo = vars(source)["lent_as"]
    alias = func in ALIASES or _shares(out, source)
    if not held.dims and not (alias and held.apart):
        return out
    dims = (
        held.dims
        if out.shape == _plain(source).shape
        else frozenset(range(out.ndim))
        if held.dims
        else held.dims
    )
    made = out.as_subclass(LentView)
    apart = held.apart and alias and func != GET_GRAD
    vars(made)["lent_as"] = ShardInfo(held.name, dims, apart, held.access)
    return made


def _reaches(
    dims: frozenset[int], x: torch.Tensor, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> bool:
    """True if a reduction covers one of the given dims."""
    place, count = REDUCING[name], len(torch.Tensor.size(_plain(x)))
    over = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    if name in ("topk", "kthvalue", "quantile") and "dim" not in kwargs and len(args) <= place:
        over = -1 if name != "quantile" else None
    if over is None or isinstance(over, torch.Tensor):
        return True
    over = over if isinstance(over, tuple | list) else (over,)
    return bool({d % count for d in over if isinstance(d, int)} & dims) or not over


def _plain(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.nn.Parameter.__torch_function__(torch.Tensor.detach, (), (x,), {})


def _shares(x: torch.Tensor, y: torch.Tensor) -> bool:
    mine = x.untyped_storage().data_ptr()
    return mine != 0 and mine == _plain(y).untyped_storage().data_ptr()


def _lent(nest: Any) -> Iterator[torch.Tensor]:
    """The shards among the arguments of a call."""
    if type(nest) in KINDS:
        yield nest
    elif isinstance(nest, dict):
        for value in nest.values():
            yield from _lent(value)
    elif isinstance(nest, tuple | list):
        for value in nest:
            yield from _lent(value)


__all__ = ["ShardAccess"]
