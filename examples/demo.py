"""A small GPT learns to write Python from the standard library's source, on four processes of this machine.

    make demo          which is          meshwright run --nproc 4 examples/demo.py

Three hints say how three linears are sharded; the rest is propagated. The plan is shown, verified on simulated ranks,
run, and compared with one device on the same batches. Then the trained model writes a few lines.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import math
import re
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

import meshwright as mw
from meshwright.examples import gpt
from meshwright.report.plan_table import rows

PINS = {"blocks.*.attention.qkv": {"n": "tp"}, "blocks.*.up": {"n": "tp"}, "head": {"n": "tp"}}
CONFIG = gpt.GPTConfig(vocabulary=1024, width=128, layers=4, heads=4, sequence=64)
BATCH, RATE, WARM_UP, SEED = 16, 2e-3, 40, 7
TEXT_BYTES = 1 << 20
PIECE = re.compile(r"\s*\n *| ?\w+| *[^\w\s]| +")  # a line break with its indent, a word, a sign
PROMPT, TEMPERATURE = "\n    def ", 0.6

console = Console(highlight=False, width=80)


# ---------------------------------------------------------------- text, model, schedule


class Vocabulary:
    """The most frequent pieces of a text; any other word is `name`."""

    def __init__(self, text: str) -> None:
        found = Counter(p for p in PIECE.findall(text) if p.strip(" ") != "name")
        self.pieces = [p for p, _ in found.most_common(CONFIG.vocabulary - 2)] + ["name", " name"]
        self.numbers = {p: i for i, p in enumerate(self.pieces)}

    def encode(self, text: str) -> list[int]:
        other, spaced = self.numbers["name"], self.numbers[" name"]
        return [self.numbers.get(p, spaced if p[0] == " " else other) for p in PIECE.findall(text)]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.pieces[n] for n in ids)


def library_text() -> str:
    """The standard library's own modules, in the order of their names, without comments and docstrings."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise SystemExit(f"no Python source under {folder}: this Python keeps its library elsewhere")
    code = (re.sub(r'\s*"{3}[\s\S]*?"{3}|\s*#.*', "", f.read_text("utf-8")) for f in files)
    return "".join(code)[:TEXT_BYTES]


def batches(text: torch.Tensor, seed: int = SEED) -> Iterator[dict[str, torch.Tensor]]:
    """The same batches on every rank, and on one device."""
    random = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - CONFIG.sequence - 1, (BATCH, 1), generator=random)
        ids = text[starts + torch.arange(CONFIG.sequence + 1)]
        yield {"ids": ids[:, :-1].contiguous(), "targets": ids[:, 1:].contiguous()}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)


def set_rate(optimizer: torch.optim.Optimizer | None, step: int, steps: int) -> None:
    """Up in a line, then down in a line to a tenth."""
    assert optimizer is not None
    share = min(1.0, (step + 1) / WARM_UP, 0.1 + 0.9 * (1 - step / steps))
    for group in optimizer.param_groups:
        group["lr"] = RATE * share


# ---------------------------------------------------------------- the parts of the demo


def main() -> None:
    options = arguments()
    began = time.perf_counter()
    model, _, loss = gpt.build(CONFIG, seed=SEED)
    untouched = copy.deepcopy(model)
    source = library_text()
    words = Vocabulary(source)
    text = torch.tensor(words.encode(source))
    example = next(batches(text))

    # What a user writes: the model as it is, a mesh, three hints.
    how: dict[str, Any] = {"mesh": {"dp": options.dp, "tp": 2}, "mode": "sharding_propagation", "pins": PINS}
    step = mw.train_step(model, adamw, example, loss=loss, **how)
    first = step.rank == 0

    if first:
        introduce(model, text)
        heading("The plan", f"from three hints, in {time.perf_counter() - began:.1f} s with the capture")
        show_plan(step)
        prove(untouched, loss, text, how)
        heading("The run", f"{options.steps} steps of {BATCH} × {CONFIG.sequence} tokens on {step.mesh}")
    losses = train(step, text, options.steps, options.resume, shown=first)
    remember(step, model, example, shown=first)
    state = step.full_state()  # all ranks: each holds a part
    if first:
        compare(untouched, loss, text, losses, min(options.compared, options.steps))
        untouched.load_state_dict(state)
        write_on(untouched, words, options.sample)
        console.print(f"\n[dim]{time.perf_counter() - began:.0f} s in all[/]")
    mw.shutdown()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dp", type=int, default=2, help="half of the ranks: --nproc 2 is --dp 1")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--compared", type=int, default=20, help="steps that one device repeats")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="save there, and go on from what is there, with the same --steps",
    )
    parser.add_argument("--sample", type=int, default=120, help="tokens to write at the end")
    return parser.parse_args()


def heading(title: str, rest: str = "") -> None:
    console.print(Text.assemble("\n", (title, "bold"), ("  " + rest if rest else "", "dim")))


def introduce(model: torch.nn.Module, text: torch.Tensor) -> None:
    count, python = sum(p.numel() for p in model.parameters()), ".".join(map(str, sys.version_info[:2]))
    console.print(
        f"[bold]Meshwright[/] {mw.__version__}   a GPT of {count / 1e6:.1f} M parameters learns to write Python\n"
        f"from {len(text):,} tokens of the source of Python {python}'s own library"
    )


def show_plan(step: mw.TrainStep) -> None:
    table = Table("module", "sharding", "weight", "communication", box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows(step.program.parts):
        module, count, _, sharding, weight, forward, backward = dataclasses.astuple(row)
        name = module.replace("blocks.*.", "") + (f" ×{count}" if count > 1 else "")
        sent = f"→ {forward}" if forward else f"← {backward}" if backward else ""
        table.add_row(name, sharding, weight, re.sub(", .*", " …", sent.replace("inside: ", "")))
    console.print(table)


def prove(model: torch.nn.Module, loss: Any, text: torch.Tensor, how: dict[str, Any]) -> None:
    """The same plan on simulated ranks in float64, on a small batch: loss, gradients, three steps of two optimizers."""
    batch = {name: value[:4, :16].contiguous() for name, value in next(batches(text)).items()}
    began = time.perf_counter()
    report = mw.verify(model, batch, loss=loss, **how).raise_if_different()
    ranks = math.prod(how["mesh"].values())
    heading(
        "The proof", f"{ranks} simulated ranks in this process, float64, {time.perf_counter() - began:.1f} s"
    )
    console.print(
        f"  {len(report.differences)} values compared with one device: loss, gradients, parameters after three\n"
        f"  steps of SGD and of AdamW; the largest difference is {report.worst.error:.0e}"
    )


class Losses(list[float]):
    """The loss of every step; a part of checkpoints."""

    def state_dict(self) -> dict[str, list[float]]:
        return {"losses": list(self)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self[:] = state["losses"]


def train(
    step: mw.TrainStep, text: torch.Tensor, steps: int, resume: Path | None, shown: bool
) -> list[float]:
    """The loss of every step. Rank 0 shows it. With a folder to `resume` from, those before it too."""
    stream, losses = batches(text), Losses()
    autosave = mw.Autosave(step, resume, every=20, data=losses) if resume else None
    if shown and step.steps:
        console.print(f"  goes on after step {step.steps}")
    for _ in range(step.steps):  # the same batches as without a break
        next(stream)
    columns = (
        TextColumn(" "),
        BarColumn(32, complete_style="cyan"),
        MofNCompleteColumn(),
        TextColumn("{task.fields[now]}"),
    )
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("", total=steps, completed=step.steps, now="")
        began, first = time.perf_counter(), step.steps
        for number in range(first, steps):
            set_rate(step.optimizer, number, steps)
            losses.append(step(next(stream)).item())
            speed = (number + 1 - first) * BATCH * CONFIG.sequence / (time.perf_counter() - began)
            bar.update(task, advance=1, now=f"loss {losses[-1]:.3f}   {speed:,.0f} tokens/s")
            if shown and not console.is_terminal:  # a log has no bar
                print(f"  step {number + 1} loss {losses[-1]:.3f}", flush=True)
            if autosave:
                autosave()
    if autosave:
        autosave.close()
    if shown:
        marks = [steps * n // 5 for n in range(6)]
        shown_losses = (f"[dim]{n or 1}:[/] {losses[max(n - 1, 0)]:.2f}" for n in dict.fromkeys(marks))
        console.print("  loss at step  " + "  ".join(shown_losses))
        draw(losses)
    return losses


def draw(losses: list[float], width: int = 60, height: int = 8) -> None:
    """The losses as a curve: columns are means over a few steps, rows have eight levels each."""
    edges = [round(i * len(losses) / width) for i in range(width + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in itertools.pairwise(edges) if b > a]
    low, high = min(means), max(means)
    levels = [round((m - low) / ((high - low) or 1) * (8 * height - 1)) + 1 for m in means]
    for row in reversed(range(height)):
        label = high if row == height - 1 else low if row == 0 else None
        bar = "".join(" ▁▂▃▄▅▆▇█"[max(0, min(8, level - 8 * row))] for level in levels)
        console.print(f"  {label:4.1f} " if label is not None else "       ", end="")
        console.print(bar, style="cyan")


def remember(step: mw.TrainStep, model: torch.nn.Module, batch: dict[str, torch.Tensor], shown: bool) -> None:
    """What a rank holds: parameters, gradients and AdamW's moments, and what forward keeps for backward."""
    kept: dict[int, int] = {}

    def keep(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    own = {p.untyped_storage().data_ptr() for p in step.parameters.values()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        step.gradients(batch)
    activations = sum(size for place, size in kept.items() if place not in own)
    mine, full = state_bytes(step.parameters.values()) / 1e6, state_bytes(model.parameters()) / 1e6
    if shown:
        console.print(
            f"  a rank holds {mine:.1f} MB of parameters, gradients and moments (one device: {full:.1f} MB)\n"
            f"  and saves {activations / 1e6:.1f} MB of activations for backward"
        )


def state_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of parameters, their gradients and AdamW's two moments."""
    return 4 * sum(p.numel() * p.element_size() for p in parameters)


def compare(model: torch.nn.Module, loss: Any, text: torch.Tensor, losses: list[float], count: int) -> None:
    """The first steps again on one device, from the same weights."""
    twin, stream, steps = copy.deepcopy(model), batches(text), len(losses)
    optimizer = adamw(twin.parameters())
    worst, began = 0.0, time.perf_counter()
    for number, expected in enumerate(losses[:count]):
        set_rate(optimizer, number, steps)
        optimizer.zero_grad()
        value = loss(twin, next(stream))
        value.backward()
        optimizer.step()
        worst = max(worst, abs(value.item() - expected))
    heading(
        "One device",
        f"plain PyTorch on the first {count} of these batches, {time.perf_counter() - began:.0f} s",
    )
    console.print(f"  largest difference of the loss, in float32: {worst:.1e}")


@torch.no_grad()
def write_on(model: torch.nn.Module, words: Vocabulary, count: int) -> None:
    """Sample tokens one by one, never the placeholders of rare words."""
    random = torch.Generator().manual_seed(SEED)
    ids = words.encode(PROMPT)
    model.eval()
    for _ in range(count):
        logits = model(torch.tensor([ids[-CONFIG.sequence :]]))[0, -1] / TEMPERATURE
        ids.append(int(torch.multinomial(logits[:-2].softmax(0), 1, generator=random)))
    heading("What it writes", f"after {PROMPT!r}, at temperature {TEMPERATURE}")
    console.print(Padding(Text(words.decode(ids).strip("\n"), style="cyan"), (0, 0, 0, 2)))


if __name__ == "__main__":
    main()
