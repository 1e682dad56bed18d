"""Layouts by the names of a device matrix, as MindSpore has them."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.core.type_guards import is_whole
from meshwright.errors import StrategyError, a_type, did_you_mean

TURNS = "interleaved_parallel"  # the reference's name of an axis that is none of ranks
_TORCH = str(Path(torch.__file__).parent)
_OWN = {__file__, str(Path(__file__).with_name("annotate.py"))}


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
    """A device matrix whose dims have names, as MindSpore's `Layout`.

    ``Layout((2, 2, 2), ("dp", "sp", "mp"))("mp", ("sp", "dp"))`` splits dim 0 of a tensor over mp and dim 1 over dp and
    sp (in the order of the matrix: dp splits first). ``"None"`` (or None) leaves a dim unsplit. `rank_list` gives the
    ranks in row-major order of the matrix. For MindSpore's ``"interleaved_parallel"`` pass ``interleave=2`` to the
    step.
    """

    matrix: tuple[int, ...]
    aliases: tuple[str, ...]
    rank_list: tuple[int, ...] | None = None

    def __init__(
        self, device_matrix: Sequence[int], alias_name: Sequence[str], rank_list: Sequence[int] | None = None
    ) -> None:
        matrix, aliases = tuple(device_matrix), tuple(alias_name)
        for n in matrix:
            check_count(n, "the device matrix")
        if len(matrix) != len(aliases):
            raise StrategyError(
                f"a device matrix of {len(matrix)} dims has {len(aliases)} names",
                why=f"{matrix} and {aliases}",
                where=user_frame(),
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
                where=user_frame(),
                hint='Layout((2, 4), ("dp", "tp"))',
            )
        if TURNS in aliases:
            copies = matrix[aliases.index(TURNS)]
            rest = [(n, a) for n, a in zip(matrix, aliases, strict=True) if a != TURNS]
            raise StrategyError(
                f"the device matrix {matrix} has the axis {TURNS!r}",
                why=f"it stands for {copies} copies of a tensor on each rank, which take turns, not for ranks: here "
                "the full step is interleaved, and not one operator",
                where=user_frame(),
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
                where=user_frame(),
                hint=f"a permutation of 0 … {total - 1}",
            )
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "aliases", aliases)
        object.__setattr__(self, "rank_list", ranks)

    def __call__(self, *dims: str | Sequence[str] | None) -> TensorLayoutSpec:
        """Return the layout of a tensor from one entry per dim. Raises StrategyError for unknown or repeated names."""
        spread: list[tuple[str, ...]] = []
        used: dict[str, int] = {}
        for number, dim in enumerate(dims):
            if not (dim is None or isinstance(dim, str | tuple | list)):
                raise StrategyError(
                    f"the layout has {dim!r} for dim {number}",
                    why=f"it is {a_type(dim)}; a dim is split over named axes, not into a number of blocks",
                    where=user_frame(),
                    hint=f'a name of {self.aliases}, a tuple of them, or "None"',
                )
            names = () if dim is None or dim == "None" else (dim,) if isinstance(dim, str) else tuple(dim)
            for name in names:
                if name not in self.aliases:
                    raise StrategyError(
                        f"the device matrix has no dim named {name!r}",
                        why=f"names: {self.aliases}",
                        where=user_frame(),
                        hint=did_you_mean(str(name), self.aliases),
                    )
                if name in used:
                    raise StrategyError(
                        f"the axis {name!r} is used twice, for dims {used[name]} and {number}",
                        why="an axis can split one dim of a tensor",
                        where=user_frame(),
                        hint="use another axis for one of them",
                    )
                used[name] = number
            spread.append(names)
        return TensorLayoutSpec(self, tuple(spread))

    def data(self) -> dict[str, Any]:
        """As JSON data."""
        data: dict[str, Any] = {"matrix": list(self.matrix), "aliases": list(self.aliases)}
        return data | ({"ranks": list(self.rank_list)} if self.rank_list else {})


def check_count(n: Any, what: str) -> None:
    """Raise StrategyError unless `n` is a whole number of at least 1."""
    if not is_whole(n):
        raise StrategyError(
            f"{what} has {n!r}, which is not a whole number",
            why="it counts the blocks of a dim",
            where=user_frame(),
            hint="1, 2, 3, …; 1 leaves a dim unsplit",
        )
    if n < 1:
        raise StrategyError(
            f"{what} has {n}",
            why="a dim has at least one block",
            where=user_frame(),
            hint="1 leaves a dim unsplit",
        )


def user_frame() -> str:
    """The line of the user's code, for messages: the innermost frame that is neither ours nor torch's."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename not in _OWN and not frame.filename.startswith(_TORCH):
            return f"{Path(frame.filename).name}:{frame.lineno}  {frame.line}"
    return ""
