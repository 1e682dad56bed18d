"""Who runs against whom in `bench.pipeline`: pipelines of ours, and those of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn import functional as F

import meshwright as mw
from bench.steps import Case, Step, adamw, cycled

TORCH: Mapping[str, Any] = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved": ScheduleInterleaved1F1B,
}
EQUAL, BALANCED = "equal", "balanced"


@dataclass(frozen=True)
class Way:
    """One contender. `torch`: theirs; else ours, under a plan of its own. `split`: as many layers a stage, or stages
    that the planner has balanced."""

    schedule: str
    stages: int
    micro_batches: int
    split: str = EQUAL
    torch: bool = False


@dataclass(frozen=True)
class Row:
    """Two contenders on a model and so many ranks; what is printed is the first one's time over the second's."""

    group: str
    ranks: int
    case: Case
    one: Way
    other: Way
    about: str = field(default="")


SHORT, DEEP, LONG = Case("GPT", 256, 4, 64, 8), Case("GPT", 256, 8, 64, 8), Case("GPT", 512, 4, 128, 8)
HEAVY = Case("GPT", 256, 8, 64, 8, vocabulary=16384)


def rows() -> list[Row]:
    """All of them, those of one number of ranks together."""

    def against_torch(ranks: int, case: Case, schedule: str, pieces: int, stages: int = 0) -> Row:
        stages = stages or ranks
        ours, theirs = (Way(schedule, stages, pieces, torch=them) for them in (False, True))
        return Row("torch", ranks, case, ours, theirs, f"{schedule}, {pieces} micro-batches")

    def zero(ranks: int, case: Case, pieces: int) -> Row:
        one, other = (Way(schedule, ranks, pieces) for schedule in ("zero_bubble", "1f1b"))
        return Row("zero", ranks, case, one, other, f"zero_bubble over 1f1b, {pieces} micro-batches")

    def balanced(ranks: int, pieces: int) -> Row:
        one, other = (Way("1f1b", ranks, pieces, split) for split in (BALANCED, EQUAL))
        return Row(
            "balanced", ranks, HEAVY, one, other, f"balanced over equal stages, {pieces} micro-batches"
        )

    return [
        # Short stages, where what each message costs shows, and long ones.
        against_torch(2, SHORT, "1f1b", 4),
        against_torch(2, SHORT, "1f1b", 8),
        against_torch(2, LONG, "1f1b", 4),
        against_torch(2, SHORT, "gpipe", 4),
        against_torch(2, LONG, "gpipe", 4),
        against_torch(2, DEEP, "interleaved", 4, stages=4),
        against_torch(4, DEEP, "1f1b", 8),
        against_torch(4, DEEP, "gpipe", 8),
        zero(2, LONG, 4),
        zero(2, SHORT, 8),
        zero(4, DEEP, 8),
        balanced(2, 4),
        balanced(4, 8),
    ]


def step_of(case: Case, way: Way) -> tuple[Step, Any]:
    """A contender's step; of ours also what `mw.train_step` returned."""
    if way.torch:
        return theirs(case, way), None
    model, batches, loss = case.build()
    how: dict[str, Any] = {"mesh": dist.get_world_size(), "pipeline": way.stages, "schedule": way.schedule}
    if way.split == EQUAL:
        how["stages"] = equal(case, way.stages)
    step = mw.train_step(model, adamw, batches[0], loss=loss, micro_batches=way.micro_batches, **how)
    return cycled(step, batches), step


def equal(case: Case, stages: int) -> dict[str, int]:
    """As many blocks in each stage, the embeddings in the first and the head in the last."""
    each = case.layers // stages
    found = {f"blocks.{s * each}-{(s + 1) * each - 1}": s for s in range(stages)}
    return {"tokens": 0, "positions": 0, **found, "norm": stages - 1, "head": stages - 1}


class Part(nn.Module):
    """The blocks of a GPT in a stage, with the embeddings before the first and the head after the last."""

    def __init__(self, model: Any, stage: int, stages: int) -> None:
        super().__init__()
        each = len(model.blocks) // stages
        self.first, self.last = stage == 0, stage == stages - 1
        self.blocks = model.blocks[stage * each : (stage + 1) * each]
        if self.first:
            self.tokens, self.positions = model.tokens, model.positions
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Token ids [batch, sequence] or activations [batch, sequence, width] → activations or logits."""
        if self.first:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.last else x


def theirs(case: Case, way: Way) -> Step:
    """The same stages in torch's runtime, split by hand into modules. The loss is on the rank of the last one; the
    others have none."""
    model, batches, _ = case.build()
    rank, ranks, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")
    mine = range(rank, way.stages, ranks)
    parts = [Part(model, stage, way.stages) for stage in mine]
    del model
    optimizer = adamw([p for part in parts for p in part.parameters()])
    stages = [PipelineStage(part, s, way.stages, device) for part, s in zip(parts, mine, strict=True)]
    order = TORCH[way.schedule](
        stages if way.schedule == "interleaved" else stages[0], way.micro_batches, loss_fn=_loss
    )
    first, last = parts[0].first, parts[-1].last

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        given = (batch["ids"],) if first else ()
        if last:
            order.step(*given, target=batch["targets"], losses=losses, return_outputs=False)
        else:
            order.step(*given)
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.tensor(0.0)

    return cycled(step, batches)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


__all__ = ["Row", "Way", "rows", "step_of"]
