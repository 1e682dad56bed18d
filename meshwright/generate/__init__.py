"""`generator`: tokens from a causal model of Hugging Face under any plan, with a cache of keys and values in shards.

The loop over tokens, with its processors of logits, its sampling and its rules to stop, is transformers' own
``generate``. What it calls for logits are programs of two kinds over one set of shards: one reads prompts, one reads a
token of each. Keys and values go from one to the next as each rank holds them; only the logits of the last token are
gathered.

Prompts are padded on the left to one of few lengths, and the cache on the right, so that few programs are made. What
sees what is said by a mask, which is an input.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Unpack

import torch
import torch.nn.functional as F

from meshwright.checks.model_checks import check_model
from meshwright.core.techniques import Options
from meshwright.cost.cluster import Cluster
from meshwright.errors import RunError
from meshwright.generate.cache import SLOTS, RankCache, layers_of, names, padded_length
from meshwright.generate.shell import (
    SLIDING,
    check_equal,
    check_way,
    draws_of_first,
    kinds_of,
    moved,
    parameters_of,
    prompts,
    shell_of,
    stops_of_first,
    text_config,
)
from meshwright.inference.forward_program import Outputs
from meshwright.inference.forward_step import ForwardStep, forward_step
from meshwright.loss.evaluation import kept_modes
from meshwright.plan.plan import Plan
from meshwright.runtime.local_batch import LocalBatch
from meshwright.search.wanted import MeshLike, Pins

log = logging.getLogger("meshwright")
PROGRAMS = 16  # that are kept
LOGITS = "out0"

Build = Callable[[Any, Outputs], ForwardStep]


class Generator:
    """A generator of tokens, returned by `mw.generator`.

    `first` is the program for prompts as long as the example; inspect its `plan` and `program`.
    """

    def __init__(self, model: torch.nn.Module, ids: torch.Tensor, build: Build, shares: bool = False) -> None:
        """`build` makes the first forward step, and all others where those that it makes share what they hold."""
        in_mode = kept_modes(model)
        self._kinds, self._window = kinds_of(model)
        self._dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        self._layers = text_config(model).num_hidden_layers
        self._outputs = _outputs(self._layers, {"logits_to_keep"} & parameters_of(model))
        self._programs: OrderedDict[tuple[Any, ...], ForwardStep] = OrderedDict()
        self._build, self._in_mode = build, lambda: in_mode(model)
        self.first = self._prefill(ids.shape[0], padded_length(ids.shape[1]))
        if self.first.local.pipe is not None:
            raise RunError(
                "generation does not support pipeline stages",
                why="every token would go through all stages, one after the other",
                hint="leave out pipeline=: tensor parallelism splits each layer",
            )
        if not shares:
            self._build = lambda batch, outputs: self.first.beside(model, batch, outputs)
        self._device = self.first.local.rank.device
        self._shell = shell_of(model, self._device, self._dtype, self._next)

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.first.rank

    @torch.no_grad()
    def generate(self, input_ids: torch.Tensor, **how: Any) -> Any:
        """Generate tokens as ``model.generate(input_ids, **how)`` of transformers does, greedily or by sampling. Every
        rank calls it with equal arguments.

        `how` are transformers' own arguments, such as ``attention_mask`` (prompts are padded on the left),
        ``max_new_tokens``, ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``eos_token_id``, ``pad_token_id``,
        ``generation_config`` and ``logits_processor``. Every rank draws from rank 0's random generator.

        Returns token ids [batch, prompt + new], or an object with ``return_dict_in_generate=True``. Raises RunError for
        beam search and other modes that are neither greedy nor sampled, and BatchError if ranks pass different prompts
        or options.
        """
        self.first.check_unchanged()
        input_ids = prompts(self._shell, input_ids)
        defaults = self._shell.generation_config
        check_way(defaults, how)
        check_equal(input_ids, how)
        config = how.get("generation_config") or defaults
        ahead = how.get("max_new_tokens", config.max_new_tokens)
        if ahead is None:
            ahead = (how.get("max_length", config.max_length) or 0) - input_ids.shape[1]
        how = stops_of_first(config, how, self.first.local.world, self._device)
        how = moved({**how, "past_key_values": RankCache(max(int(ahead), 1))}, self._device)
        with self.first.access.inside(), draws_of_first(self.first.local.world, self._device):
            found = self._shell.generate(input_ids.to(self._device), **how)
        return found.to(input_ids.device) if isinstance(found, torch.Tensor) else found

    # ------------------------------------------------------------ what transformers' loop calls

    def _next(
        self, ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None, cache: RankCache
    ) -> torch.Tensor:
        """Logits [batch, 1, vocabulary] of the last token; the cache has the new ones then."""
        batch, count = ids.shape
        if mask is None:
            mask = ids.new_ones((batch, cache.length + count))
        if positions is None:
            positions = (mask.cumsum(-1) - 1).clamp_min(0)[:, -count:]
        positions = positions.expand(batch, count)
        given: dict[str, torch.Tensor] = {}
        if not cache.length:
            slots = padded_length(count)
            cache.before = slots - count
            ids, positions = (F.pad(x, (cache.before, 0)) for x in (ids, positions))
            step, end = self._prefill(batch, slots), slots
        else:
            place = cache.make_room()
            step, end, slots = self._decode(batch, cache), place + 1, cache.slots
            given["here"] = (
                torch.arange(slots, device=self._device).eq(place).expand(batch, slots)[:, None, :, None]
            )
        seen = F.pad(mask.bool(), (cache.before, slots - cache.before - mask.shape[1]))
        given |= {"ids": ids, "positions": positions, **self._masks(seen, ids.shape[1], end)}
        local = step.local
        pieces = local.batches.micro_batches[0]
        held = {
            p.entry.name: p.take(given[p.entry.target]) if p.entry.target in given else cache.read_by(p)
            for p in pieces
        }
        results = local(LocalBatch((held,), batch, local.batches.key), gather=frozenset({LOGITS}))
        logits = results.pop(LOGITS)
        assert logits is not None
        cache.take({label: x for label, x in results.items() if x is not None}, local, count)
        # another last bit on one rank is another token, and ranks would part ways
        if local.world.mesh.size > 1:
            logits = logits.contiguous()
            local.world.broadcast(logits, 0)
        return logits

    def _masks(self, valid: torch.Tensor, queries: int, end: int) -> dict[str, torch.Tensor]:
        """Build the masks that are added to scores, by kind of layer: [batch, 1, queries, slots], for the queries
        before slot `end`."""
        slots = torch.arange(valid.shape[1], device=self._device)
        query = torch.arange(end - queries, end, device=self._device)[:, None]
        found: dict[str, torch.Tensor] = {}
        for kind in self._kinds:
            near = (slots > query - self._window) & (slots <= query) if kind == SLIDING else slots <= query
            shown = near & valid.to(self._device)[:, None, None]
            none = torch.zeros(shown.shape, dtype=self._dtype, device=self._device)
            found[f"mask.{kind}"] = none.masked_fill(~shown, torch.finfo(self._dtype).min)
        return found

    # ------------------------------------------------------------ programs

    def _prefill(self, batch: int, length: int) -> ForwardStep:
        return self._program("prompts", batch, length, lambda: self._example(batch, length, length))

    def _decode(self, batch: int, cache: RankCache) -> ForwardStep:
        def example() -> dict[str, Any]:
            made = self._example(batch, 1, cache.slots)
            made["here"] = torch.zeros(batch, 1, cache.slots, 1, dtype=torch.bool)
            for name in names(self._layers):
                shape = list(cache.layouts[name].shape)
                shape[SLOTS] = cache.slots
                made.setdefault(name.split(".")[0], []).append(
                    torch.zeros(shape, dtype=cache.parts[name].dtype)
                )
            return made

        return self._program("a token each", batch, cache.slots, example)

    def _example(self, batch: int, count: int, slots: int) -> dict[str, Any]:
        ids = torch.zeros(batch, count, dtype=torch.int64)
        masks = {kind: torch.zeros(batch, 1, count, slots, dtype=self._dtype) for kind in self._kinds}
        return {"ids": ids, "positions": ids.clone(), "mask": masks}

    def _program(self, what: str, batch: int, slots: int, example: Callable[[], Any]) -> ForwardStep:
        """A program that is there, or made; on all ranks in the same call."""
        key = (what, batch, slots)
        if key not in self._programs:
            begun = time.perf_counter()
            with self._in_mode():
                self._programs[key] = self._build(example(), self._outputs)
            seconds = time.perf_counter() - begun
            log.info(
                "generate: a program for %s, %d of %d slots, made in %.1f s", what, batch, slots, seconds
            )
            if len(self._programs) > PROGRAMS:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        return self._programs[key]


def _outputs(layers: int, kept: set[str] | frozenset[str]) -> Outputs:
    """Build the function that the programs compute: logits of the last token, and keys and values of all layers."""

    def outputs(model: Any, batch: Any) -> dict[str, Any]:
        from transformers.cache_utils import Cache

        made = layers_of(batch, layers)
        masks = batch["mask"]
        found = model(
            input_ids=batch["ids"],
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            position_ids=batch["positions"],
            past_key_values=Cache(layers=made),
            use_cache=True,
            **dict.fromkeys(kept, 1),
        )
        return {
            "logits": found.logits[:, -1:],
            "keys": [layer.keys for layer in made],
            "values": [layer.values for layer in made],
        }

    return outputs


def generator(
    model: torch.nn.Module,
    batch: Any,
    *,
    plan: Plan | str | Path | None = None,
    mesh: MeshLike = None,
    mode: str | None = None,
    pins: Pins | None = None,
    cluster: Cluster | None = None,
    broadcast: bool | int = True,
    weights: str | Path | None = None,
    init: Any = None,
    cast: bool = False,
    device: torch.device | str | None = None,
    **techniques: Unpack[Options],
) -> Generator:
    """Build a generator of tokens for a causal language model of Hugging Face. Every rank calls it.

    The key-value cache is sharded by heads under tensor parallelism and by prompts under data parallelism. A program is
    built for each number of prompts and each padded length. All arguments that are not listed are those of
    `mw.forward_step`.

    Args:
        model: The model, in evaluation mode (``model.eval()``).
        batch: Example prompts: token ids [batch, tokens], or what a tokenizer returns.

    Raises RunError for a model that is not a causal language model.
    """
    check_model(model)
    ids = prompts(model, batch)

    def build(batch: Any, outputs: Outputs) -> ForwardStep:
        return forward_step(
            model, batch, outputs=outputs, plan=plan, mesh=mesh, mode=mode, pins=pins, cluster=cluster,
            broadcast=broadcast, weights=weights, init=init, cast=cast, device=device, **techniques,
        )  # fmt: skip

    return Generator(model, ids, build)


__all__ = ["Generator", "generator"]
