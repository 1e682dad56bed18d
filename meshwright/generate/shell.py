"""A model without weights on which transformers' ``generate`` runs; its logits come from elsewhere."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from meshwright.capture.pytree import map_leaves
from meshwright.errors import BatchError, RunError, a_type
from meshwright.runtime.agreement import checksum
from meshwright.runtime.communicator import Communicator
from meshwright.runtime.rendezvous import Meeting

FULL, SLIDING = "full_attention", "sliding_attention"  # transformers' words for kinds of layers
READ = ("input_ids", "attention_mask", "position_ids", "past_key_values")
REFUSED = {
    "use_cache": (lambda v: v is False, "it is what makes each token cost one token"),
    "num_beams": (lambda v: (v or 1) > 1, "beams reorder the cache; greedy or sampled ones do not"),
    "prefill_chunk_size": (lambda v: v is not None, "a prompt is read at once"),
    "output_attentions": (lambda v: bool(v), "programs return only logits"),
    "output_hidden_states": (lambda v: bool(v), "programs return only logits"),
    "cache_implementation": (lambda v: v is not None, "the cache is of shards"),
    "past_key_values": (lambda v: v is not None, "the cache is of shards"),
    "inputs_embeds": (lambda v: v is not None, "prompts are token ids"),
    "assistant_model": (lambda v: v is not None, "one token comes at a time"),
    "prompt_lookup_num_tokens": (lambda v: v is not None, "one token comes at a time"),
    "penalty_alpha": (lambda v: bool(v), "one token comes at a time"),
    "dola_layers": (lambda v: v is not None, "programs return only logits"),
    "guidance_scale": (
        lambda v: v not in (None, 1),
        "it reads the prompts a second time, into a cache of its own",
    ),
    "custom_generate": (lambda v: v is not None, "the loop is transformers' own"),
}

Following = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None, Any], torch.Tensor]


def parameters_of(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of the arguments of a model's forward."""
    return frozenset(inspect.signature(type(model).forward).parameters)


def prompts(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    """The token ids of an example. Raises RunError for a model that cannot generate with a cache."""
    config, makes = getattr(model, "config", None), getattr(model, "can_generate", None)
    takes = parameters_of(model)
    if (
        config is None
        or makes is None
        or not makes()
        or config.is_encoder_decoder
        or not takes.issuperset(READ)
    ):
        lacks = ", ".join(name for name in READ if name not in takes)
        raise RunError(
            f"{type(model).__name__} is not a causal model of transformers that generates with position_ids and a "
            "cache",
            why=f"its forward does not take {lacks}" if lacks else "transformers' generate cannot run it",
            hint="a model such as LlamaForCausalLM; mw.forward_step gives the logits of others",
        )
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or ids.dtype != torch.int64 or not ids.numel():
        shown = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, torch.Tensor) else a_type(ids)
        raise BatchError(
            f"the example prompts are {shown}",
            why="token ids are int64 of shape [batch, tokens]",
            hint='tokenizer(texts, return_tensors="pt", padding=True), with padding_side="left"',
        )
    return ids


def text_config(model: Any) -> Any:
    """The configuration of the decoder of a Hugging Face model."""
    return model.config.get_text_config(decoder=True)


def kinds_of(model: torch.nn.Module) -> tuple[tuple[str, ...], int]:
    """The kinds of attention that a model's layers have, and the tokens that a sliding one looks back. Raises RunError
    for others."""
    config = text_config(model)
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    found = tuple(sorted(set(kinds))) if kinds else (SLIDING if window else FULL,)
    odd = [kind for kind in found if kind not in (FULL, SLIDING)]
    if odd:
        raise RunError(
            f"{type(model).__name__} has layers of {odd[0]}",
            why="generation keeps only keys and values between tokens",
        )
    return found, window


def shell_of(model: torch.nn.Module, device: torch.device, dtype: torch.dtype, following: Following) -> Any:
    """A model of the same class without weights: ``generate`` of transformers calls `following` for logits."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    kind: Any = type(model)

    class Shell(kind):
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)
            self.config = model.config
            self.generation_config = copy.deepcopy(model.generation_config)

        @property
        def device(self) -> torch.device:
            return device

        @property
        def dtype(self) -> torch.dtype:
            return dtype

        def forward(
            self,
            input_ids: Any = None,
            attention_mask: Any = None,
            position_ids: Any = None,
            past_key_values: Any = None,
            logits_to_keep: Any = None,
            use_cache: Any = None,
            **_: Any,
        ) -> Any:
            logits = following(input_ids, attention_mask, position_ids, past_key_values)
            return CausalLMOutputWithPast(logits=logits, past_key_values=past_key_values)

    Shell.__name__ = kind.__name__
    return Shell().eval()


def check_way(config: Any, how: Mapping[str, Any]) -> None:
    """Raise RunError for a way to generate that is neither greedy nor sampled."""
    config = how.get("generation_config") or config
    for name, (wrong, why) in REFUSED.items():
        value = how[name] if name in how else getattr(config, name, None)
        if wrong(value):
            raise RunError(
                f"generate({name}={value!r})"
                if not isinstance(value, torch.nn.Module)
                else f"generate({name}=…)",
                why=why,
                hint=f"leave out {name}=",
            )


def check_equal(ids: torch.Tensor, how: Mapping[str, Any]) -> None:
    """Raise BatchError on all ranks where one has other prompts or options than rank 0. Collective."""

    def word(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return f"{value.dtype}{list(value.shape)} {checksum(value)}"
        if hasattr(value, "to_json_string"):
            return str(value.to_json_string())
        if isinstance(value, list | tuple):  # a processor in it is said by its kind: its address differs
            return f"[{', '.join(map(word, value))}]"
        plain = value is None or isinstance(value, bool | int | float | str)
        return repr(value) if plain else a_type(value)

    mine = {"input_ids": word(ids), **{name: word(value) for name, value in how.items()}}
    words = [json.loads(text) for text in Meeting().collect(json.dumps(mine))]
    for rank, theirs in enumerate(words):
        differ = [name for name in {**words[0], **theirs} if words[0].get(name) != theirs.get(name)]
        if differ:
            raise BatchError(
                f"rank {rank} generates with another {differ[0]} than rank 0",
                why="all ranks compute one batch of prompts together",
                hint="the same prompts and options on all ranks; data parallelism takes each rank's part of them",
            )


def stops_of_first(
    config: Any, how: Mapping[str, Any], comm: Communicator, device: torch.device
) -> dict[str, Any]:
    """Arguments with which all ranks stop where rank 0 does: clocks differ, and what the user's criteria read may."""
    from transformers.generation import stopping_criteria as of_transformers

    given: list[Any] = list(how.get("stopping_criteria") or ())
    timed, seconds = of_transformers.MaxTimeCriteria, how.get("max_time", config.max_time)
    if seconds is not None and not any(isinstance(c, timed) for c in given):
        given.append(timed(seconds))
    # the others of transformers read tokens and options alone, and some replace those of the same kind
    known = [c for c in given if type(c).__module__ == of_transformers.__name__ and not isinstance(c, timed)]
    asked: Any = of_transformers.StoppingCriteriaList([c for c in given if c not in known])
    if comm.mesh.size == 1 or not asked:
        return dict(how)

    def stops(ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        done = asked(ids, scores, **more).to(device, torch.uint8)
        comm.broadcast(done, 0)
        return done.bool()

    every: list[Any] = [*known, stops]
    return {**how, "max_time": None, "stopping_criteria": of_transformers.StoppingCriteriaList(every)}


def moved(how: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Arguments with their tensors on a device."""
    return {
        k: map_leaves(v, lambda t: t.to(device)) if isinstance(v, torch.Tensor) else v for k, v in how.items()
    }


@contextlib.contextmanager
def draws_of_first(comm: Communicator, device: torch.device) -> Iterator[None]:
    """While it is entered all ranks draw the random numbers of rank 0; the others' own go on afterwards."""
    if comm.mesh.size == 1:
        yield
        return
    on_device = device.type == "cuda"
    own = torch.cuda.get_rng_state(device) if on_device else torch.get_rng_state()
    shared = own.clone().to(device)
    comm.broadcast(shared, 0)
    put = (lambda state: torch.cuda.set_rng_state(state, device)) if on_device else torch.set_rng_state
    put(shared.cpu())
    try:
        yield
    finally:
        if comm.rank != 0:
            put(own)


__all__ = [
    "FULL",
    "SLIDING",
    "check_equal",
    "check_way",
    "draws_of_first",
    "kinds_of",
    "moved",
    "parameters_of",
    "prompts",
    "shell_of",
    "stops_of_first",
]
