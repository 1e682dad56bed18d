"""A byte-level GPT reads the source of Python's standard library, on four processes of this machine.

    make demo          which is          meshwright run --nproc 4 examples/demo.py

Two annotations say how two linears of a layer are cut; the rest is propagated. The plan is shown, proved on simulated
ranks, run, compared with one device on the same batches, and what was trained writes a few lines.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import sysconfig
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.text import Text

import meshwright as mw
from meshwright.examples import gpt
from meshwright.report.plan_table import plan_view

MESH = {"dp": 2, "tp": 2}
PINS = {"blocks.*.attention.qkv": {"n": "tp"}, "blocks.*.up": {"n": "tp"}}
CONFIG = gpt.GPTConfig()
BATCH, RATE, WARM_UP, SEED = 8, 1e-3, 20, 7
TEXT_BYTES = 4 << 20
PROMPT, TEMPERATURE = "def ", 0.6

console = Console(highlight=False)


# ---------------------------------------------------------------- text, model, schedule


def library_text() -> torch.Tensor:
    """The bytes of the standard library's own modules, in the order of their names."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if not files:
        raise SystemExit(f"no Python source under {folder}: this Python keeps its library elsewhere")
    data = b"".join(f.read_bytes() for f in files)[:TEXT_BYTES]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def batches(text: torch.Tensor, seed: int = SEED) -> Iterator[dict[str, torch.Tensor]]:
    """The same batches on every rank, and on one device."""
    random = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - CONFIG.sequence - 1, (BATCH, 1), generator=random)
        ids = text[starts + torch.arange(CONFIG.sequence + 1)].long()
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
    first = int(os.environ.get("RANK", "0")) == 0
    began = time.perf_counter()
    model, _, loss = gpt.build(CONFIG, seed=SEED)
    untouched = copy.deepcopy(model)
    text = library_text()
    example = next(batches(text))

    # What a user writes: the model as it is, a mesh, two annotations.
    how: dict[str, Any] = {"mesh": MESH, "mode": "sharding_propagation", "pins": PINS}
    step = mw.train_step(model, adamw, example, loss=loss, **how)

    if first:
        introduce(model, text)
        heading("The plan", f"from two annotations, in {time.perf_counter() - began:.1f} s with the capture")
        console.print(Padding(plan_view(step.program.parts), (0, 0, 0, 2)))
        prove(untouched, loss, text, how)
        heading("The run", f"{options.steps} steps of {BATCH} × {CONFIG.sequence} bytes on {step.mesh}")
    losses = train(step, text, options.steps, options.resume, shown=first)
    remember(step, model, example, shown=first)
    state = step.full_state()  # all ranks: each holds a part
    if first:
        compare(untouched, loss, text, losses, min(options.compared, options.steps))
        untouched.load_state_dict(state)
        write_on(untouched, options.sample)
        console.print(f"\n[dim]{time.perf_counter() - began:.0f} s in all[/]")
    mw.shutdown()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--compared", type=int, default=25, help="steps that one device repeats")
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FOLDER",
        help="save there, and go on from what is there, with the same --steps",
    )
    parser.add_argument("--sample", type=int, default=200, help="bytes to write at the end")
    return parser.parse_args()


def heading(title: str, rest: str = "") -> None:
    console.print(Text.assemble("\n", (title, "bold"), ("  " + rest if rest else "", "dim")))


def introduce(model: torch.nn.Module, text: torch.Tensor) -> None:
    count = sum(p.numel() for p in model.parameters())
    console.print(
        f"[bold]Meshwright[/] {mw.__version__}   a GPT of {count / 1e6:.1f} M parameters learns the source of Python "
        f"{sys.version_info.major}.{sys.version_info.minor}'s library ({len(text) / 1e6:.1f} MB of bytes)"
    )


def prove(model: torch.nn.Module, loss: Any, text: torch.Tensor, how: dict[str, Any]) -> None:
    """The same plan on simulated ranks in float64, on a small batch: loss, gradients, three steps of two optimizers."""
    batch = {name: value[:4, :16].contiguous() for name, value in next(batches(text)).items()}
    began = time.perf_counter()
    torch.set_num_threads(os.cpu_count() or 1)
    report = mw.verify(model, batch, loss=loss, **how).raise_if_different()
    torch.set_num_threads(1)
    heading("The proof", f"4 simulated ranks in this process, float64, {time.perf_counter() - began:.1f} s")
    console.print(
        f"  loss, gradients and parameters after three steps of SGD and of AdamW: {len(report.differences)} compared, "
        f"largest difference to one device {report.worst.error:.0e}"
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
    with Progress(*columns, console=console, disable=not shown) as bar:
        task = bar.add_task("", total=steps, completed=step.steps, now="")
        began, first = time.perf_counter(), step.steps
        for number in range(first, steps):
            set_rate(step.optimizer, number, steps)
            losses.append(step(next(stream)).item())
            speed = (number + 1 - first) * BATCH * CONFIG.sequence / (time.perf_counter() - began)
            bar.update(task, advance=1, now=f"loss {losses[-1]:.3f}   {speed:,.0f} tokens/s")
            if autosave:
                autosave()
    if autosave:
        autosave.close()
    if shown:
        marks = [steps * n // 5 for n in range(6)]
        shown_losses = (f"[dim]{n or 1}:[/] {losses[max(n - 1, 0)]:.2f}" for n in dict.fromkeys(marks))
        console.print("  loss at step  " + "   ".join(shown_losses))
    return losses


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
    mine, whole = state_bytes(step.parameters.values()), state_bytes(model.parameters())
    if shown:
        console.print(
            f"  a rank holds {mine / 1e6:.0f} MB of parameters, gradients and AdamW's moments, where one device holds "
            f"{whole / 1e6:.0f} MB,\n  and keeps {activations / 1e6:.0f} MB of activations from forward to backward"
        )


def state_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes of parameters, their gradients and AdamW's two moments."""
    return 4 * sum(p.numel() * p.element_size() for p in parameters)


def compare(model: torch.nn.Module, loss: Any, text: torch.Tensor, losses: list[float], count: int) -> None:
    """The first steps again on one device, from the same weights."""
    twin, stream, steps = copy.deepcopy(model), batches(text), len(losses)
    optimizer = adamw(twin.parameters())
    worst, began = 0.0, time.perf_counter()
    torch.set_num_threads(os.cpu_count() or 1)
    for number, expected in enumerate(losses[:count]):
        set_rate(optimizer, number, steps)
        optimizer.zero_grad()
        value = loss(twin, next(stream))
        value.backward()
        optimizer.step()
        worst = max(worst, abs(value.item() - expected))
    heading("One device", f"plain PyTorch, the same {count} batches, {time.perf_counter() - began:.0f} s")
    console.print(f"  largest difference of the loss, float32, over {count} steps of training: {worst:.1e}")


@torch.no_grad()
def write_on(model: torch.nn.Module, count: int) -> None:
    """Sample bytes one by one."""
    random = torch.Generator().manual_seed(SEED)
    ids = list(PROMPT.encode())
    model.eval()
    for _ in range(count):
        logits = model(torch.tensor([ids[-CONFIG.sequence :]]))[0, -1] / TEMPERATURE
        ids.append(int(torch.multinomial(logits.softmax(0), 1, generator=random)))
    written = bytes(ids).decode(errors="replace")
    heading("What it writes", f'after "{PROMPT}", at temperature {TEMPERATURE}')
    console.print(Padding(Text(written, style="cyan"), (0, 0, 0, 2)))


if __name__ == "__main__":
    main()
