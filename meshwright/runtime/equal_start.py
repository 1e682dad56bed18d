"""Equal values on all ranks before the first step: compared by checksums, and sent only where they differ."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence

import torch

from meshwright import heartbeat
from meshwright.errors import RunError
from meshwright.runtime.communicator import Communicator

CHUNK = 1 << 26  # bytes of a tensor on a GPU that are looked at together
log = logging.getLogger("meshwright")


def start_equal(
    comm: Communicator,
    device: torch.device,
    tensors: Mapping[str, torch.Tensor],
    source: int | None,
    axes: Sequence[str] = (),
) -> list[str]:
    """Give tensors that all ranks have, under equal names, the values of rank `source` where they differ; their names.

    `source` None refuses differences: RunError on all ranks. `axes`: compare the ranks along these axes alone, of
    which there is a process group; `source` is one of them then. Reads every byte once, and communicates 16 bytes a
    tensor where all are equal. `device`: where the communicator wants its tensors. Collective.
    """
    axes = tuple(axes) or tuple(a.name for a in comm.mesh.axes)
    named = {n: x for n, x in tensors.items() if x.layout == torch.strided and not x.is_meta}
    if comm.mesh.count(axes) == 1 or not named:
        return []
    group = sorted(comm.mesh.group(comm.rank, axes))
    first = group[0] if source is None else source
    with torch.no_grad(), heartbeat.during("comparing the ranks' first values"):
        _same_tensors(comm, device, named, axes)
        mine = torch.tensor([checksum(x) for x in named.values()], dtype=torch.int64, device=device)
        heartbeat.of("checksums of parameters and buffers")
        theirs = comm.all_reduce(mine if comm.rank == first else torch.zeros_like(mine), axes)
        counts = comm.all_reduce((theirs != mine).to(torch.int64), axes).tolist()
        odd = [(name, n) for name, n in zip(named, counts, strict=True) if n]
        if odd and source is None:
            name, ranks = odd[0]
            raise RunError(
                f"ranks start from different values: {name} differs from rank {first} on {ranks} of {len(group)} ranks",
                why=f"{len(odd)} of {len(named)} parameters and buffers differ, and broadcast=False allows no "
                "difference",
                hint=f"leave out broadcast= to take those of rank {first}, or give all ranks one seed before they "
                "build the model: torch.manual_seed(0)",
            )
        for name, _ in odd:
            _take(comm, device, named[name], first, axes)
    if odd and comm.rank == group[0]:
        log.warning(
            "%d of %d parameters and buffers differed between ranks at the start (%s); all took those of rank %d",
            *(len(odd), len(named), ", ".join(n for n, _ in odd[:3]) + ", …" * (len(odd) > 3), first),
        )
    return [name for name, _ in odd]


def _same_tensors(
    comm: Communicator, device: torch.device, named: Mapping[str, torch.Tensor], axes: Sequence[str]
) -> None:
    """Raise RunError on all ranks where one has other names, shapes or dtypes."""
    text = "\n".join(f"{n} {tuple(x.shape)} {x.dtype}" for n, x in named.items())
    mine = torch.tensor([zlib.crc32(text.encode())], device=device)
    if not torch.equal(comm.all_reduce(mine, axes), mine * comm.mesh.count(axes)):
        raise RunError(
            "ranks have different parameters or buffers",
            why="their names, shapes or dtypes differ",
            hint="build the model in the same way on every rank; for mw.manual_step, list parameters of single ranks "
            "in local_parameters=",
        )


def checksum(x: torch.Tensor) -> int:
    """The CRC-32 of a tensor's bytes, in the order of its elements."""
    found, flat = 0, _bytes_of(x.detach())
    for piece in (flat,) if x.device.type == "cpu" else flat.split(CHUNK):
        found = zlib.crc32(piece.cpu().numpy().data, found)
    return found


def _take(
    comm: Communicator, device: torch.device, x: torch.Tensor, source: int, axes: Sequence[str]
) -> None:
    """Overwrite a tensor by that of one rank. The others add zeros to its bytes, so that any group can do it."""
    own = _bytes_of(x.detach()).to(device)
    heartbeat.of("first values")
    found = comm.all_reduce(own if comm.rank == source else torch.zeros_like(own), axes)
    x.detach().copy_(found.to(x.device).view(x.dtype).view(x.shape))


def _bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


__all__ = ["start_equal"]
