"""Buffers that a step changes, in a pipeline: the place that makes a new value gives it to all others that have the
buffer, whose stages read it in the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from meshwright.core.rank_numbers import PipelineRank
from meshwright.redistribute.across_meshes import Route
from meshwright.runtime.communicator import Work
from meshwright.runtime.pipeline_rank import Pipeline


def handed_on(
    pipe: Pipeline,
    new: Sequence[tuple[str, str]],
    made: Mapping[str, torch.Tensor],
    held: Mapping[str, tuple[torch.Tensor | None, Sequence[PipelineRank]]],
    tags: Mapping[str, int],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The buffers of this rank that a step changes, each with its new value. Collective.

    `new`: input → the value that replaces it. `made`: what this rank has made. `held`: input → this rank's tensor, and
    the places that have the buffer. `tags`: input → a tag of its own.
    """
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    sending: list[Work] = []
    for name, value in new:
        (mine, holders), maker, comm = held[name], pipe.maker(value), pipe.comm
        laid = pipe.held(name)

        def route(to: PipelineRank, laid=laid, maker=maker) -> Route | None:
            return None if laid is None else Route(laid(maker), laid(to))

        if comm.place == maker:
            new_value = made[value].contiguous()
            others = (p for p in holders if p != maker)
            sending += [comm.send_to(new_value, p, tags[name], route(p)) for p in others]
        elif mine is not None:
            room = torch.empty_like(mine, memory_format=torch.contiguous_format)
            new_value = comm.receive_from(room, maker, tags[name], route(comm.place)).wait()
        else:
            continue
        if mine is not None:
            found.append((mine, new_value))
    for work in sending:
        work.wait()
    return found


__all__ = ["handed_on"]
