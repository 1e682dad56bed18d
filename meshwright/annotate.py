"""Annotations in a model's own code: `mw.shard`, `mw.reshard`, `mw.on_host`, `mw.recompute`, `mw.stage`,
`mw.manual_split`, `mw.Layout`. On one device they do nothing.

While the model is captured they leave marks at their inputs and outputs; the planner turns the marks into cuts.
"""

from __future__ import annotations

import functools
import itertools
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, overload

import torch

from meshwright.core.graph import AGAIN_MARK, ROWS_MARK, STAGE_MARK
from meshwright.core.techniques import RECOMPUTE
from meshwright.core.type_guards import is_whole
from meshwright.errors import PlanError, StrategyError, a_type, did_you_mean

Blocks = tuple[int, ...]
F = TypeVar("F", bound=Callable[..., Any])

TURNS = "interleaved_parallel"  # the reference's name of an axis that is none of ranks

_sites: Iterator[int] = itertools.count()
_TORCH = str(Path(torch.__file__).parent)

_lib = torch.library.Library("meshwright", "FRAGMENT")
_lib.define("pin(Tensor x, str spec) -> Tensor")
_lib.impl("pin", lambda x, spec: x.clone(), "CompositeExplicitAutograd")
torch.library.register_fake("meshwright::pin", lambda x, spec: torch.empty_like(x), lib=_lib)
torch.library.register_autograd(
    "meshwright::pin",
    lambda ctx, gradient: (gradient, None),
    setup_context=lambda ctx, inputs, output: None,
    lib=_lib,
)


@dataclass(frozen=True)
class TensorLayoutSpec:
    """A device layout applied to a tensor: for each dim the aliases of the device matrix that split it.

    The aliases of one dim split it in the order of the device matrix, whatever order they are given in.
    """

    device: Layout
    dims: tuple[tuple[str, ...], ...]

    @property
    def tensor_map(self) -> tuple[int | tuple[int, ...], ...]:
        """MindSpore's form: positions of the aliases counted from the right, -1 for an unsplit dim."""
        count = len(self.device.aliases)
        places = [tuple(count - 1 - self.device.aliases.index(a) for a in dim) for dim in self.dims]
        return tuple(p[0] if len(p) == 1 else p if p else -1 for p in places)

    def data(self) -> dict[str, Any]:
        """As JSON data."""
        return {"mesh": self.device.data(), "dims": [list(d) for d in self.dims]}


@dataclass(frozen=True)
class Layout:
    """A device matrix with a name for each of its dims, as MindSpore's `Layout`.

    ``Layout((2, 2, 2), ("dp", "sp", "mp"))("mp", ("sp", "dp"))`` splits dim 0 over mp and dim 1 over dp and sp (in the
    order of the matrix: dp splits first). ``"None"`` (or None) leaves a dim unsplit. ``"interleaved_parallel"`` is no
    axis here: the step takes ``interleave=2``. `rank_list` gives the ranks in row-major order of the matrix.
    """

    matrix: tuple[int, ...]
    aliases: tuple[str, ...]
    rank_list: tuple[int, ...] | None = None

    def __init__(
        self, device_matrix: Sequence[int], alias_name: Sequence[str], rank_list: Sequence[int] | None = None
    ) -> None:
        matrix, aliases = tuple(device_matrix), tuple(alias_name)
        for n in matrix:
            _check_count(n, "the device matrix")
        if len(matrix) != len(aliases):
            raise StrategyError(
                f"a device matrix of {len(matrix)} dims has {len(aliases)} names",
                why=f"{matrix} and {aliases}",
                where=_caller(),
                hint="one name for each dim of the matrix",
            )
        if (
            len(set(aliases)) != len(aliases)
            or "None" in aliases
            or any(not isinstance(a, str) or not a for a in aliases)
        ):
            raise StrategyError(
                f"the names {aliases} of a device matrix must be different words",
                why='a layout identifies axes by their names, and "None" stands for an unsplit dim',
                where=_caller(),
                hint='Layout((2, 4), ("dp", "tp"))',
            )
        if TURNS in aliases:
            copies = matrix[aliases.index(TURNS)]
            rest = [(n, a) for n, a in zip(matrix, aliases, strict=True) if a != TURNS]
            raise StrategyError(
                f"the device matrix {matrix} has the axis {TURNS!r}",
                why=f"it stands for {copies} copies of a tensor on each rank, which take turns, not for ranks: here "
                "the full step is interleaved, and not one operator",
                where=_caller(),
                hint=f"Layout({tuple(n for n, _ in rest)}, {tuple(a for _, a in rest)}), and interleave={copies} in "
                "mw.plan or mw.train_step (docs/reference/techniques.md)",
            )
        total = 1
        for n in matrix:
            total *= n
        ranks = tuple(rank_list) if rank_list is not None else None
        if ranks is not None and sorted(ranks) != list(range(total)):
            raise StrategyError(
                f"rank_list must list each of the {total} ranks once",
                why=f"got {ranks}",
                where=_caller(),
                hint=f"a permutation of 0 … {total - 1}",
            )
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "aliases", aliases)
        object.__setattr__(self, "rank_list", ranks)

    def __call__(self, *dims: str | Sequence[str] | None) -> TensorLayoutSpec:
        """The layout of a tensor, one entry for each of its dims. Raises StrategyError for unknown or
        repeated names."""
        spread: list[tuple[str, ...]] = []
        used: dict[str, int] = {}
        for number, dim in enumerate(dims):
            if not (dim is None or isinstance(dim, str | tuple | list)):
                raise StrategyError(
                    f"the layout has {dim!r} for dim {number}",
                    why=f"it is {a_type(dim)}; a dim is split over named axes, not into a number of blocks",
                    where=_caller(),
                    hint=f'a name of {self.aliases}, a tuple of them, or "None"',
                )
            names = () if dim is None or dim == "None" else (dim,) if isinstance(dim, str) else tuple(dim)
            for name in names:
                if name not in self.aliases:
                    raise StrategyError(
                        f"the device matrix has no dim named {name!r}",
                        why=f"names: {self.aliases}",
                        where=_caller(),
                        hint=did_you_mean(str(name), self.aliases),
                    )
                if name in used:
                    raise StrategyError(
                        f"the axis {name!r} is used twice, for dims {used[name]} and {number}",
                        why="an axis can split one dim of a tensor",
                        where=_caller(),
                        hint="use another axis for one of them",
                    )
                used[name] = number
            spread.append(names)
        return TensorLayoutSpec(self, tuple(spread))

    def data(self) -> dict[str, Any]:
        """As JSON data."""
        data: dict[str, Any] = {"matrix": list(self.matrix), "aliases": list(self.aliases)}
        return data | ({"ranks": list(self.rank_list)} if self.rank_list else {})


Cut = Blocks | TensorLayoutSpec


@overload
def shard(
    target: torch.nn.Module,
    in_strategy: Sequence[Any] | None = None,
    out_strategy: Sequence[Any] | None = None,
) -> torch.nn.Module: ...
@overload
def shard(
    target: F, in_strategy: Sequence[Any] | None = None, out_strategy: Sequence[Any] | None = None
) -> F: ...


def shard(
    target: Any, in_strategy: Sequence[Any] | None = None, out_strategy: Sequence[Any] | None = None
) -> Any:
    """Shard an operator or a module: ``mw.shard(torch.matmul, ((2, 4), (4, 1)))(x, w)``, ``mw.shard(module, ((2,
    1),))``.

    `in_strategy` has an entry for each tensor argument: the number of blocks of each dim, a layout of `mw.Layout`, or
    None for no constraint; `out_strategy` the same for the results (one entry may stand alone). If the product of
    blocks is below the number of ranks, the computation is replicated. A module is returned itself, with hooks; a
    function as a wrapper. Nothing happens on one device. Raises StrategyError for entries that are not integers above
    0, and for tuples mixed with layouts.
    """
    name = _name_of(target)
    ins = _check_strategies(in_strategy, f"in_strategy of {name}")
    outs = _check_strategies(out_strategy, f"out_strategy of {name}")
    kinds = {isinstance(s, TensorLayoutSpec) for s in (*ins, *outs) if s is not None}
    if len(kinds) > 1:
        raise StrategyError(
            f"the strategies of {name} mix tuples and layouts",
            why="tuples leave the choice of mesh axes to the planner, layouts name them",
            where=_caller(),
            hint="write all of them as tuples, or all with one mw.Layout",
        )
    return _marked(target, name, ins, outs)


def reshard(x: torch.Tensor, layout: Cut) -> torch.Tensor:
    """The same tensor, to be held in this layout from here on. On one device: the tensor itself."""
    (cut,) = _check_strategies((layout,), "layout of mw.reshard")
    return _mark(x, cut, next(_sites), "in", "mw.reshard") if _marking() else x


def on_host(target: F) -> F:
    """Run a module or a function on the host's processor: ``table = mw.on_host(nn.Embedding(n, d))``.

    Parameters that only it reads live in the host's memory, their gradients and their optimizer's states too; values
    cross over the link to the host, forward and backward, as transfers of the program. A module is returned itself,
    with its hooks; a function as a wrapper. Works in every mode; nothing happens without a plan.
    """
    name = f"mw.on_host of {_name_of(target)}"
    return _marked(target, name, mark="host")


def manual_split(target: F, rows: Sequence[int]) -> F:
    """Shard a table along the columns of its indices: ``mw.manual_split(nn.Embedding(64, 16), (10, 20, 30, 4))``.

    `rows` has, for each column (the last dim) of the indices, the number of table rows that belong to it, in order:
    here column 1 holds indices from 10 to 29. Columns and their rows can then be split together, into uneven blocks,
    and nothing is sent: pin the columns, ``{"table": {"c": "tp"}}``. A module is returned itself, with hooks; a
    function as a wrapper. Nothing happens on one device. Raises StrategyError for `rows` that are not positive
    integers.
    """
    name = f"mw.manual_split of {_name_of(target)}"
    given = tuple(rows) if isinstance(rows, Sequence) and not isinstance(rows, str) else ()
    if not given or any(not is_whole(n) or n < 1 for n in given):
        raise StrategyError(
            f"{name} is given {rows!r}",
            why="it is the number of rows of each column of the indices",
            where=_caller(),
            hint="mw.manual_split(table, (10, 20, 30, 4))",
        )
    table = getattr(target, "num_embeddings", None)
    if table is not None and table != sum(given):
        raise StrategyError(
            f"{name} is given {' + '.join(map(str, given))} = {sum(given)} rows",
            why=f"the table has {table}",
            where=_caller(),
        )
    return _marked(target, name, mark=f"{ROWS_MARK}{','.join(map(str, given))}")


def recompute(target: F, enabled: bool = True, *, policy: str = "full") -> F:
    """Compute a module or a function again in backward instead of keeping what it makes: ``mw.recompute(block)``.

    What enters a call and what it returns is kept as ever. `policy`: ``"full"`` computes all between them again,
    ``"selective"`` only what is cheap. ``mw.recompute(module, False)`` keeps what it makes though the module around it,
    or the plan, says otherwise: the innermost annotation counts, and any before ``recompute=`` of the plan. A module is
    returned itself, with its hooks; a function as a wrapper. Works in every mode; nothing happens without a plan.
    Raises PlanError for a policy that there is not.
    """
    name = f"mw.recompute of {_name_of(target)}"
    if not isinstance(enabled, bool):
        raise PlanError(
            f"{name} is given {enabled!r}", why="it is a switch", where=_caller(), hint='policy="selective"'
        )
    if policy not in RECOMPUTE:
        raise PlanError(
            f"{name} has the policy {policy!r}",
            why="policies: " + ", ".join(map(repr, RECOMPUTE)),
            where=_caller(),
            hint=did_you_mean(str(policy), RECOMPUTE),
        )
    return _marked(target, name, mark=f"{AGAIN_MARK}{policy if enabled else ''}")


def stage(target: F, number: int) -> F:
    """Put a module or a function into a stage of the pipeline: ``mw.stage(model.encoder, 0)``.

    Stages count from 0 in the order in which the model runs; operators that no call names go where they balance. A
    module is returned itself, with its hooks; a function as a wrapper. Nothing happens without a plan of
    ``pipeline=``. Raises PlanError for what is no stage.
    """
    name = f"mw.stage of {_name_of(target)}"
    if not is_whole(number) or number < 0:
        raise PlanError(
            f"{name} is given {number!r}",
            why="stages are numbered from 0",
            where=_caller(),
            hint="mw.stage(module, 0)",
        )
    if not callable(target):
        raise PlanError(
            f"mw.stage is given {target!r:.80}",
            why=f"it is {a_type(target)}; modules and functions have operators",
            where=_caller(),
            hint="mw.stage(model.encoder, 0)",
        )
    return _marked(target, name, mark=f"{STAGE_MARK}{number}")


def _marked(
    target: Any,
    name: str,
    ins: Sequence[Cut | None] = (),
    outs: Sequence[Cut | None] = (),
    mark: str = "",
) -> Any:
    """Return a module with hooks, or a wrapper of a function, that mark the tensors of a call at its inputs and
    results: with strategies, or with a word that capture attaches to the operators between them (`capture/marks.py`).
    """
    _check_target(target, name)

    def entered(given: Any, site: int) -> Any:
        return _mark_all(given, ins, site, "in", name, mark)

    def left(result: Any, site: int) -> Any:
        return _mark_all(result, outs, site, "out", name, mark)

    if isinstance(target, torch.nn.Module):
        sites: list[int] = []

        def before(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not _marking():
                return None
            sites.append(next(_sites))
            return entered((args, kwargs), sites[-1])

        def after(module: torch.nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            return left(result, sites.pop()) if sites and _marking() else None

        target.register_forward_pre_hook(before, with_kwargs=True)
        target.register_forward_hook(after)
        return target

    @functools.wraps(target)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not _marking():
            return target(*args, **kwargs)
        site = next(_sites)
        args, kwargs = entered((args, kwargs), site)
        return left(target(*args, **kwargs), site)

    return wrapper


def _name_of(target: Any) -> str:
    return getattr(target, "__name__", type(target).__name__)


def _check_target(target: Any, name: str) -> None:
    """Raise StrategyError for what is never called: a mark at it would be lost in silence."""
    why = hint = ""
    if isinstance(target, torch.nn.ModuleList | torch.nn.ModuleDict):
        why = f"{a_type(target)} only holds modules, it is never called itself"
        hint = "annotate each of the modules in it"
    elif isinstance(target, type) and issubclass(target, torch.nn.Module):
        why = f"{target.__name__} is a class"
        hint = "annotate the module that it makes: mw.…(nn.Linear(2, 3))"
    elif not callable(target):
        why = f"it is {a_type(target)}, which is never called"
        hint = "a module or a function"
        if isinstance(target, torch.Tensor):
            hint = "the module, or the function, that reads the tensor"
    if why:
        raise StrategyError(f"{name} marks nothing", why=why, where=_caller(), hint=hint)


def _marking() -> bool:
    return torch.compiler.is_exporting()


def _mark_all(
    tree: Any, entries: Sequence[Cut | None], site: int, role: str, name: str, mark: str = ""
) -> Any:
    """Mark every tensor of a nest of tuples, lists and dicts, in order; tensors beyond the given entries are
    unconstrained."""
    numbers = itertools.count()

    def walk(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            number = next(numbers)
            return _mark(value, entries[number] if number < len(entries) else None, site, role, name, mark)
        if isinstance(value, dict):
            return {k: walk(v) for k, v in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(walk, value))
        if isinstance(value, list | tuple):
            return type(value)(map(walk, value))
        return value

    marked = walk(tree)
    count = next(numbers)
    if len(entries) > count:
        raise StrategyError(
            f"the {role}_strategy of {name} has {len(entries)} entries for {count} tensors",
            why=f"entries: {entries}",
            where=_caller(),
            hint="one entry for each tensor, None for no constraint",
        )
    return marked


def _mark(x: torch.Tensor, cut: Cut | None, site: int, role: str, name: str, mark: str = "") -> torch.Tensor:
    data: dict[str, Any] = {"site": site, "role": role, "name": name, "where": _caller()}
    if mark:
        data["mark"] = mark
    if isinstance(cut, TensorLayoutSpec):
        data["layout"] = cut.data()
    elif cut is not None:
        data["blocks"] = list(cut)
    return torch.ops.meshwright.pin(x, json.dumps(data, sort_keys=True))


def _check_strategies(given: Any, what: str) -> tuple[Cut | None, ...]:
    if given is None:
        return ()
    if isinstance(given, TensorLayoutSpec) or (
        isinstance(given, tuple | list) and given and all(isinstance(n, int) for n in given)
    ):
        given = (given,)
    if not isinstance(given, tuple | list):
        raise StrategyError(
            f"the {what} must be a tuple with one entry for each tensor",
            why=f"got {given!r}",
            where=_caller(),
            hint="((2, 4), (4, 1))",
        )
    checked: list[Cut | None] = []
    for entry in given:
        if entry is None or isinstance(entry, TensorLayoutSpec):
            checked.append(entry)
            continue
        if not isinstance(entry, tuple | list):
            raise StrategyError(
                f"the {what} has the entry {entry!r}",
                why="an entry says for one tensor how each of its dims is cut",
                where=_caller(),
                hint="a tuple with the number of blocks of each dim, or a layout",
            )
        for n in entry:
            _check_count(n, f"the {what}")
        checked.append(tuple(entry))
    return tuple(checked)


def _check_count(n: Any, what: str) -> None:
    if not is_whole(n):
        raise StrategyError(
            f"{what} has {n!r}, which is not a whole number",
            why="it counts the blocks of a dim",
            where=_caller(),
            hint="1, 2, 3, …; 1 leaves a dim unsplit",
        )
    if n < 1:
        raise StrategyError(
            f"{what} has {n}",
            why="a dim has at least one block",
            where=_caller(),
            hint="1 leaves a dim unsplit",
        )


def _caller() -> str:
    """The line of the user's code, for messages: the innermost frame that is neither ours nor torch's."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename != __file__ and not frame.filename.startswith(_TORCH):
            return f"{Path(frame.filename).name}:{frame.lineno}  {frame.line}"
    return ""
