"""The result of a verification: differences relative to the expected values, and the first operator that differs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.core.layout import TensorLayout
from meshwright.core.mesh import Mesh
from meshwright.errors import MeshwrightError
from meshwright.plan.plan import Plan


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
    """The result of a verification. `ok` is true if every difference is within the tolerance.

    `inexact`: operators that by design see one micro-batch only; all is then compared with one device that runs the
    same micro-batches instead of the full batch. `captured`: all is compared with the captured program on one device,
    because the model draws random numbers within torch's own functions, which differ from those of plain PyTorch.
    """

    plan: Plan
    dtype: torch.dtype
    tolerance: float
    differences: tuple[Difference, ...]
    first: str = ""
    inexact: tuple[str, ...] = ()
    captured: bool = False

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
        result = "equal to one device" if self.ok else "DIFFERENT from one device"
        result += " in the same micro-batches" if self.inexact else ""
        mesh = self.plan.mesh_text if self.plan.meshes else self.plan.mesh
        asked = f", {self.plan.techniques}" if str(self.plan.techniques) else ""
        kinds: dict[str, list[Difference]] = {}
        for d in self.differences:
            kinds.setdefault(d.what.split(" of ")[0].split(" after ")[0], []).append(d)
        lines = [
            f"{result} ({self.plan.mode} on {mesh}{asked}, "
            f"{str(self.dtype).removeprefix('torch.')}, tolerance {self.tolerance:g})"
        ]
        if self.inexact:
            more = f" and {len(self.inexact) - 4} more" if len(self.inexact) > 4 else ""
            lines.append(
                f"  inexact by design, statistics of a micro-batch: {', '.join(self.inexact[:4])}{more}"
            )
        if self.captured:
            lines.append(
                "  random numbers are drawn within functions of torch: compared with the captured program on one device"
            )
        for kind, found in kinds.items():
            worst = max(found, key=lambda d: d.error)
            lines.append(
                f"  {kind}: {len(found)} compared, largest difference {worst.error:.2g} ({worst.what})"
            )
        if self.first:
            lines.append(f"  first difference: {self.first}")
        return "\n".join(lines)


def take(whole: torch.Tensor, layout: TensorLayout, mesh: Mesh, rank: int) -> torch.Tensor:
    """Slice the shard of a rank out of a full tensor."""
    indices = layout.indices(mesh, mesh.coordinate(rank))
    for dim, index in enumerate(indices):
        if len(index) != whole.shape[dim]:
            whole = whole.index_select(dim, torch.from_numpy(index))
    return whole


def relative_error(
    value: torch.Tensor, expected: torch.Tensor, scale_of: torch.Tensor | None = None, least: float = 1e-3
) -> float:
    """Largest difference over the largest magnitude expected (at least `least`, so that zeros do not divide)."""
    if value.shape != expected.shape:
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    scale = _wide(expected if scale_of is None else scale_of).abs().max().item()
    difference = (_wide(value) - _wide(expected)).abs().max().item()
    return difference / max(scale, least)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.detach().to(torch.complex128 if x.is_complex() else torch.float64)
