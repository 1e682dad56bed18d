"""Training loops drawn at random, beside the same loop in plain PyTorch: models, losses, optimizers, plans, and habits.

Between steps, a loop freezes parameters, changes learning rates, edits and evaluates full weights, accumulates, takes
batches of other sizes, and goes on under another plan from a checkpoint.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import meshwright as mw
from meshwright.errors import MeshwrightError

STEPS, WIDTH, CLASSES = 7, 6, 5
EVENTS = ("freeze", "evaluate", "resize", "accumulate", "save", "rate", "edit")
CLOSE = 1e-8  # in float64, over the size of what is compared

Batch = dict[str, torch.Tensor]


class Layers(nn.Module):
    """Equal layers, for pipelines; the first and last weights are one."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(17, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.table((x.abs() * 5).long() % 17)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return F.linear(self.norm(h), self.table.weight).mean(1)[:, :CLASSES]


class Branches(nn.Module):
    """A norm, a parameter without a module, and a branch that is added."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 13), nn.LayerNorm(13)
        self.inner, self.down = nn.Linear(13, 13), nn.Linear(13, CLASSES)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.gelu(self.norm(self.up(x)))
        return self.down(h + self.inner(h) * self.scale)


class Experts(nn.Module):
    """Two of three experts for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, 3), nn.Linear(8, CLASSES)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.GELU()) for _ in range(3))
        self.back = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        share = self.gate(h).softmax(-1)
        best = share.topk(2, -1)
        kept = torch.zeros_like(share).scatter(-1, best.indices, best.values)
        return self.down(self.back(sum(e(h) * kept[:, i : i + 1] for i, e in enumerate(self.experts))))


class Attention(nn.Module):
    """Two layers that share their weights; two heads of queries for each of keys."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.q, self.kv = nn.Linear(2, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8)
        self.out, self.norm, self.down = nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x.view(-1, 3, 2))
        for _ in range(2):
            n = self.norm(h)
            q = self.q(n).view(-1, 3, 4, 2).transpose(1, 2)
            k, v = self.kv(n).view(-1, 3, 2, 4).repeat_interleave(2, 2).transpose(1, 2).chunk(2, -1)
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + self.out(found.transpose(1, 2).reshape(-1, 3, 8))
        return self.down(h.mean(1))


class Norms(nn.Module):
    """A convolution with batch norm, whose running statistics are part of the state."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 6, 3, padding=1, bias=False), nn.BatchNorm1d(6)
        self.down = nn.Linear(6 * WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.norm(self.conv(x[:, None]))).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.down = nn.GRU(2, 7, batch_first=True), nn.Linear(7, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.cells(x.view(-1, 3, 2))[0][:, -1])


def _weighted(model: Any, batch: Batch) -> torch.Tensor:
    each = model(batch["x"]).square().mean(1)
    return (each * batch["w"]).sum() / batch["w"].sum()


MODELS = (Layers, Branches, Experts, Norms, Recurrent, Attention)
LOSSES: tuple[Callable[[Any, Batch], torch.Tensor], ...] = (
    lambda model, b: F.cross_entropy(model(b["x"]), b["y"]),
    lambda model, b: F.cross_entropy(model(b["x"]), torch.where(b["y"] == 0, -100, b["y"])),
    _weighted,
    lambda model, b: F.mse_loss(model(b["x"])[:, 0], b["w"], reduction="sum"),
)
OPTIMIZERS: tuple[tuple[type[torch.optim.Optimizer], dict[str, Any]], ...] = (
    (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (torch.optim.AdamW, {"lr": 0.01, "eps": 1e-3}),
    (torch.optim.Adam, {"lr": 0.01, "eps": 1e-3, "amsgrad": True}),
    (torch.optim.Adagrad, {"lr": 0.05, "eps": 1e-3}),
    (torch.optim.RMSprop, {"lr": 0.01, "eps": 1e-3, "centered": True, "momentum": 0.5}),
    (torch.optim.NAdam, {"lr": 0.01, "eps": 1e-3}),
    (torch.optim.ASGD, {"lr": 0.01}),
)


class Loop:
    """One loop: a step of ours and a plain optimizer, which do the same."""

    def __init__(self, seed: int, ranks: int, folder: Path) -> None:
        self.chance, self.draw = random.Random(seed), torch.Generator().manual_seed(seed)
        self.ranks, self.folder, self.told = ranks, folder, [f"seed {seed}"]
        self.kind, self.loss = self.chance.choice(MODELS), self.chance.choice(LOSSES)
        self.optimizer, self.grouped = self.chance.choice(OPTIMIZERS), self.chance.random() < 0.4
        self.clip, self.rows = self.chance.choice((None, None, 0.5)), self.chance.choice((3, 4, 6, 7, 9))
        torch.manual_seed(seed)
        self.plain = self.kind().double()
        self.first = self.batch(self.rows)
        self.model = copy.deepcopy(self.plain)
        self.step = self.built(self.model, self.options())
        self.update = self.made(self.plain.named_parameters())
        self.schedules = [torch.optim.lr_scheduler.StepLR(o, 2, 0.5) for o in self.optimizers]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        assert self.step.optimizer is not None
        return [self.step.optimizer, self.update]

    def batch(self, rows: int) -> Batch:
        x = torch.randn(rows, WIDTH, generator=self.draw, dtype=torch.float64)
        w = torch.rand(rows, generator=self.draw, dtype=torch.float64) + 0.1
        return {"x": x, "y": torch.randint(CLASSES, (rows,), generator=self.draw), "w": w}

    def made(self, named: Any) -> torch.optim.Optimizer:
        kind, options = self.optimizer
        pairs = list(named)
        if not self.grouped:
            return kind([p for _, p in pairs], **options)
        groups = [[p for n, p in pairs if ("bias" in n) == biases] for biases in (False, True)]
        return kind([{"params": groups[0]}, {"params": groups[1], "lr": 0.02}], **options)

    def built(self, model: nn.Module, options: dict[str, Any]) -> mw.TrainStep:
        self.told.append(str(options))
        return mw.train_step(
            model,
            lambda parameters: self.made(parameters.named()),
            self.first,
            loss=self.loss,
            clip_norm=self.clip,
            **options,
        )

    def options(self) -> dict[str, Any]:
        """A plan and techniques."""
        often, one = (lambda share: self.chance.random() < share), self.chance.choice
        found: dict[str, Any] = {}
        if often(0.5):
            found |= {"optimizer_parallel": one((1, 2, 3)), "threshold_kb": 0}
        if often(0.3) and self.kind is not Norms:  # its statistics are those of a micro-batch
            found["micro_batches" if often(0.7) else "interleave"] = 2
        if often(0.25):
            found["recompute"] = one(("full", "selective"))
        if often(0.35):
            found["offload"] = one(("optimizer", "activations", "parameters"))
        if often(0.2):
            found["fusion"] = one((0, 64, "auto"))
        match one(("data", "data", "spread", "auto", "stages")):
            case "spread":
                return {**found, "mesh": {"tp": self.ranks}, "mode": "sharding_propagation"}
            case "auto":
                return {**found, "cluster": mw.Cluster.local(self.ranks), "mode": "auto"}
            case "stages" if self.kind is Layers:
                found.pop("interleave", None)
                schedule = one(("1f1b", "gpipe", "zero_bubble"))
                alone = {k: v for k, v in found.items() if k not in ("optimizer_parallel", "threshold_kb")}
                staged = {"pipeline": self.ranks, "schedule": schedule, "micro_batches": 2}
                return {**alone, "mesh": {"dp": 1}, **staged}
        if self.ranks == 4 and often(0.4):
            mode, cluster = one(("sharding_propagation", "dynamic_programming")), mw.Cluster.local(self.ranks)
            return {**found, "mesh": {"a": 2, "b": 2}, "mode": mode, "cluster": cluster}
        return {**found, "mesh": {"dp": self.ranks}}

    def run(self) -> None:
        for _ in range(STEPS):
            event = self.chance.choice((*EVENTS, "", "", ""))
            self.told.append(event)
            rows = self.chance.choice((2, 3, 5, 8)) if event == "resize" else self.rows
            happen = getattr(self, f"_{event}", None)
            if happen is not None:
                happen()
            self.update.zero_grad()
            batches = [self.batch(rows) for _ in range(2 if event == "accumulate" else 1)]
            for number, batch in enumerate(batches, 1):
                expected = self.loss(self.plain, batch)
                expected.backward()
                self._same("loss", self.step(batch, update=number == len(batches)), expected.detach())
            if self.clip is not None:
                nn.utils.clip_grad_norm_(self.plain.parameters(), self.clip)
            self.update.step()
            for schedule in self.schedules:
                schedule.step()
        full = self.step.full_state()
        for name, value in self.plain.state_dict().items():
            self._same(name, full[name], value)

    def _same(self, what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
        both = (
            found.isnan() & expected.isnan()
        )  # of the mean over targets that are all ignored, and from there on
        if both.all():
            return
        off = (found - expected)[~both].abs().max().item()
        assert off <= CLOSE * (1 + expected[~both].abs().max().item()), (what, off, self.told)

    # ---------------------------------------------------------------- what happens between steps

    def _freeze(self) -> None:
        name = self.chance.choice([n for n, _ in self.plain.named_parameters()])
        trains = self.chance.random() < 0.5
        for model in (self.plain, self.model):
            model.get_parameter(name).requires_grad_(trains)

    def _rate(self) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= 0.7

    def _edit(self) -> None:
        name = self.chance.choice([n for n, _ in self.plain.named_parameters()])
        with self.step.full() as whole, torch.no_grad():
            whole.get_parameter(name).mul_(0.9)
            self.plain.get_parameter(name).mul_(0.9)

    def _evaluate(self) -> None:
        with self.step.full() as whole, torch.no_grad():
            whole.eval()
            self.plain.eval()
            self._same("evaluated", self.loss(whole, self.first), self.loss(self.plain, self.first))
            whole.train()
            self.plain.train()

    def _save(self) -> None:
        """Go on under another plan, if there is one for these rows."""
        path, model = self.folder / f"{self.told[0]} {len(self.told)}", self.kind().double()
        self.step.save(path)
        for name, parameter in self.plain.named_parameters():
            model.get_parameter(name).requires_grad_(parameter.requires_grad)
        try:
            step = self.built(model, self.options())
        except MeshwrightError as error:
            self.told.append(error.what)
            return
        step.load(path)
        before = self.schedules[0].state_dict()
        self.step, self.model = step, model
        rates = [group["lr"] for group in self.update.param_groups]
        self.schedules[0] = torch.optim.lr_scheduler.StepLR(self.optimizers[0], 2, 0.5)
        self.schedules[0].load_state_dict(before)
        for group, rate in zip(self.optimizers[0].param_groups, rates, strict=True):
            group["lr"] = rate  # the schedule has begun anew on it


def train(first: int, last: int, ranks: int, folder: str) -> None:
    """Run the loops of some seeds, and print how many were refused as a whole: a plan that these rows do not allow."""
    refused = 0
    for seed in range(first, last):
        try:
            loop = Loop(seed, ranks, Path(folder))
        except MeshwrightError:
            refused += 1
            continue
        try:
            loop.run()
        except MeshwrightError as error:
            assert "the step was built for" in error.what, (str(error), loop.told)
            refused += 1  # a batch of another size, too small for the micro-batches
    print(f"{last - first} loops, {refused} refused")
    mw.shutdown()
