"""Checks, while a step runs, that all ranks use the same batch and the same optimizer options.

Each rank hashes its inputs to a number. If the sum over ranks is not that number times the number of ranks, inputs
differ; then all ranks exchange what they have, and all raise. The sum has 16 bytes, is started before the forward pass
and awaited after the backward, where ranks have met anyway. It is made in the first steps and then in every 32nd, and
before weights are saved or put together; it covers all steps since the last one. Only positions of loaders and tensors
on a GPU are looked at in these steps alone: a rank that skips a batch of a loader stays behind from then on.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import zlib
from collections.abc import Mapping, Sequence

import torch

from meshwright import heartbeat
from meshwright.errors import BatchError, MeshwrightError, RunError
from meshwright.runtime.communicator import AtOnce, Communicator, Work
from meshwright.runtime.gather_texts import gather_texts
from meshwright.runtime.local_batch import Given, LocalBatch
from meshwright.runtime.trained import PLAIN, Options, options_of

EVERY = 32
WHOLE, SOME = 1 << 14, 1 << 12  # a tensor of more elements than the first is known by as many as the second
OPTIONS = "options of the optimizer"
UPDATE = "update=False"
CLIP = "step.clip_norm"
Word = Mapping[str, str]
Which = frozenset[tuple[int, str]]  # (group, name) of some options


class RankComparison:
    """Compares the ranks of a world; alone, or where collectives are only counted, it does nothing."""

    def __init__(self, comm: Communicator, device: torch.device) -> None:
        self.comm, self.device = comm, device
        self.on = comm.mesh.size > 1 and not isinstance(comm, AtOnce)
        # Optimizer options that were equal on all ranks at the start; None: all of them.
        self.options: Which | None = None
        self.often = -1  # the step up to which ranks compare each time: one of them has just joined
        self._begun: tuple[int, list[tuple[int, Word]], torch.Tensor, Work] | None = None
        # Steps that were not compared yet, with what ranks use in them.
        self._open: list[tuple[int, Word]] = []
        # The optimizer's options in the last step, and their text.
        self._options: tuple[Sequence[Sequence[object]], str] = ([], "")

    def begin(
        self,
        steps: int,
        batch: Given,
        groups: Sequence[Mapping[str, object]] | None = None,
        update: bool = True,
        clip_norm: float | None = None,
    ) -> None:
        """Before a step, when so many are over: start the comparison if it is time for one. `groups`: those of the
        optimizer, of which `options` are compared. `update`: whether the step ends with one, of gradients that are
        clipped to `clip_norm`."""
        if not self.on:
            return
        due = self._begun is None and (is_due(steps + 1) or steps < self.often)
        word: dict[str, str] = {}
        if due or not isinstance(batch, LocalBatch):
            word |= describe_batch(batch, elsewhere=steps == 0)
        word |= {} if update else {UPDATE: "no"}
        word |= {} if clip_norm is None else {CLIP: repr(clip_norm)}
        if groups is not None and self.options != frozenset():
            word[OPTIONS] = self._text_of(groups)
        self._open.append((steps + 1, word))
        if due:
            self._start(steps + 1)

    def compare(self, steps: int) -> None:
        """Compare what was not compared yet, after so many steps. Collective. Raises as `settle`."""
        if self.on:
            self.settle()
            self._start(steps)
            self.settle()

    def _start(self, step: int) -> None:
        """Start the comparison of all that is open, in a step or after it."""
        words, self._open = self._open, []
        digest = hashlib.blake2b(json.dumps(words).encode(), digest_size=8).digest()
        numbers = [int.from_bytes(half, "little") >> 1 for half in (digest[:4], digest[4:])]
        mine = torch.tensor(numbers, dtype=torch.int64)
        heartbeat.of("whether all ranks have the same batch")
        work = self.comm.all_reduce_start(
            mine.to(self.device, copy=True), [a.name for a in self.comm.mesh.axes]
        )
        self._begun = step, words, mine, work

    def _text_of(self, groups: Sequence[Mapping[str, object]]) -> str:
        """The options that are compared, as a text; made again only where one has changed."""
        values = [[v for k, v in group.items() if k != "params" and isinstance(v, PLAIN)] for group in groups]
        if values != self._options[0] or not self._options[1]:
            self._options = values, json.dumps(some_of(options_of(groups), self.options))
        return self._options[1]

    def settle(self, steps: int | None = None) -> None:
        """Wait for a comparison that was begun, if there is one; with `steps`, only for one that was begun before so
        many were over. Raises BatchError or RunError, on all ranks."""
        if self._begun is None or (steps is not None and self._begun[0] > steps):
            return
        (step, words, mine, work), self._begun = self._begun, None
        if not torch.equal(work.wait().cpu(), mine * self.comm.mesh.size):
            raise first_difference(step, gather_texts(self.comm, self.device, words))


def is_due(step: int) -> bool:
    """True if ranks compare in a step: in the 1st, 2nd, 4th, 8th, … and then in every 32nd."""
    return step % EVERY == 0 or step & (step - 1) == 0


def describe_batch(batch: Given, elsewhere: bool = True) -> Word:
    """Describe a batch by what must be equal on all ranks: the position of a shard in its loader, or the checksums of a
    full batch. `elsewhere`: include tensors on a GPU, which requires a synchronisation."""
    if isinstance(batch, LocalBatch):
        place = batch.place if isinstance(batch.place, str) else batch.place()
        return {"position": place} if place else {}
    looked = {path: x for path, x in batch.items() if elsewhere or x.device.type == "cpu"}
    return {f"{path!r} of the batch" if path else "the batch": checksum(x) for path, x in looked.items()}


def checksum(x: torch.Tensor) -> str:
    """A checksum of a tensor's elements; of a large one, of some that are spread over it."""
    if x.layout != torch.strided or x.is_meta:
        return "unknown"
    if x.numel() > WHOLE:
        x = x.take(torch.linspace(0, x.numel() - 1, SOME, dtype=torch.float64).long().to(x.device))
    data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return f"checksum {zlib.crc32(data):08x}"


def some_of(options: Options, which: Which | None) -> Options:
    """Of options those that are asked for; None: all."""
    if which is None:
        return options
    return [{k: v for k, v in group.items() if (n, k) in which} for n, group in enumerate(options)]


def shared_options(told: Sequence[Options]) -> Which:
    """List the options that are equal in several optimizers. Empty if they differ in their number of groups, as groups
    can then not be matched."""
    if len({len(groups) for groups in told}) != 1:
        return frozenset()
    first, *others = told
    return frozenset(
        (n, k)
        for n, group in enumerate(first)
        for k, v in group.items()
        if all(groups[n].get(k) == v for groups in others)
    )


def options_that_differ(told: Sequence[Options]) -> list[str]:
    """Of options of several optimizers those that are not the same in all."""
    counts = {len(groups) for groups in told}
    if len(counts) > 1:
        return [f"{len(groups)} group{'s' if len(groups) > 1 else ''} of parameters" for groups in told]
    places = dict.fromkeys((n, key) for groups in told for n, group in enumerate(groups) for key in group)
    odd = [(n, key) for n, key in places if len({groups[n].get(key, "") for groups in told}) > 1]
    return [", ".join(f"{key}={groups[n].get(key, 'none')}" for n, key in odd) for groups in told]


def first_difference(now: int, told: Sequence[Sequence[tuple[int, Word]]]) -> MeshwrightError:
    """Build the error for the first of several steps in which ranks differ, seen in step `now` or after it."""
    for each in itertools.zip_longest(*told, fillvalue=(now, {})):
        words = [word for _, word in each]
        if any(word != words[0] for word in words):
            step = each[0][0]
            late = "" if step == now else f" (seen in step {now}: updates since then differ as well)"
            return difference(step, words, late)
    return difference(now, [{}])


def difference(step: int, told: Sequence[Word], late: str = "") -> MeshwrightError:
    """Build the error for descriptions that differ between ranks. `late`: what to say beside them."""
    for what in dict.fromkeys(k for each in told for k in each):
        said = [each.get(what, "nothing") for each in told]
        if what == OPTIONS:
            said = options_that_differ([json.loads(word) for word in said])
        ranks: dict[str, list[int]] = {}
        for rank, word in enumerate(said):
            ranks.setdefault(word, []).append(rank)
        if len(ranks) == 1:
            continue
        shown = "; ".join(f"{word} on {named(members)}" for word, members in ranks.items()) + late
        if what == OPTIONS:
            return RunError(
                f"in step {step} the {OPTIONS} differ between ranks",
                why=shown,
                hint="every rank makes the same optimizer, and changes its learning rate in the same way",
            )
        if what == UPDATE:
            return RunError(
                f"some ranks update in step {step}, others accumulate gradients",
                why=shown,
                hint="all ranks call step(batch, update=False), or use step.no_sync(), alike",
            )
        if what == CLIP:
            return RunError(
                f"{CLIP} differs between ranks in step {step}",
                why=shown,
                hint="all ranks set the same, by what is equal on them: the number of the step, the loss, the norm",
            )
        if what == "position":
            return BatchError(
                f"ranks are at different batches in step {step}",
                why=shown,
                hint="on every rank, pass each batch of the loader to the step once",
            )
        return BatchError(
            f"{what} of step {step} differs between ranks",
            why=shown,
            hint="step(batch) takes the global batch, the same on all ranks, of which each uses its part; "
            "with mw.shard_loader each rank reads only its part",
        )
    return RunError(f"ranks differ in step {step}", why="their descriptions of it are equal")


def named(ranks: Sequence[int]) -> str:
    """``rank 2``, or ``ranks 0, 1, …``."""
    shown = ", ".join(map(str, ranks[:8])) + (", …" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


__all__ = ["RankComparison", "checksum", "named", "shared_options", "options_that_differ"]
