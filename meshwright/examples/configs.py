"""A model from a Hugging Face configuration file alone: without a network, on the meta device unless weights are asked
for, which are random.

What is planned is the architecture that the file names, in training mode, with the loss that the model computes
from labels, on a batch of the asked shape. Meta tensors have shapes and no memory, so any size of model opens.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from meshwright.errors import ModelError, a_type, did_you_mean
from meshwright.examples.zoo import Built, hugging_face_loss

log = logging.getLogger("meshwright")

BATCH, SEQUENCE = 8, 1024
KINDS = {  # kind of model → the table of transformers that lists its classes; the first that has a model is taken
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "speech": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "classify": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "tokens": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
}
LENGTHS = (  # what configurations call the most tokens of a sequence
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "context_length",
    "max_seq_len",
    "max_sequence_length",
    "max_target_positions",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)
OWN_FILE = "write a function that returns (model, batch, loss), and give file.py:function"


def from_config(
    path: str | Path, *, batch: int | None = None, sequence: int | None = None, device: str = "meta"
) -> Built:
    """The model of a configuration file (or of its folder), an example batch and the loss, all on the meta device, or
    with random weights on another one.

    The batch is 8 rows of 1024 tokens unless asked otherwise, fewer tokens where the configuration allows fewer;
    images have the configuration's size. Raises ModelError.
    """
    file, data = _read(Path(path))
    with _quiet():
        config = _config(file, data)
        kind, maker = _class(file, data, config)
        if kind in (
            "seq2seq",
            "speech",
        ):  # shifted labels need both, and many files leave them to the tokenizer
            for name in ("decoder_start_token_id", "pad_token_id"):
                if getattr(config, name, None) is None:
                    setattr(config, name, 0)
        config.use_cache = False
        try:
            # On the meta device shapes alone: what a constructor would initialise is skipped.
            with torch.device(device):
                model = maker(config).to(_dtype(config))
                made = _batch(kind, config, file, batch, sequence)
        except ModelError:
            raise
        except Exception as error:  # a constructor fails in as many ways as there are models
            keys = [k for k, v in data.items() if isinstance(error, KeyError) and error.args == (v,)]
            raise ModelError(
                f"{maker.__name__} cannot be built from {file}",
                why=f"{type(error).__name__}: {error}".partition("\n")[0],
                where=f"{file}: {', '.join(keys)}" if keys else "",
                hint=f"compare {' and '.join(keys) or 'the sizes'} with a published configuration of this model",
            ) from None
    _capturable(model)
    if kind == "causal" and getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"  # what transformers falls back to, with a warning
    return model.train(), made, hugging_face_loss


def _read(path: Path) -> tuple[Path, dict[str, Any]]:
    file = path / "config.json" if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, RecursionError, UnicodeDecodeError) as error:
        raise ModelError(
            f"the configuration {str(file)!r} cannot be read",
            why=str(error),
            hint="hf: takes a local config.json or its folder; nothing is downloaded",
        ) from None
    except json.JSONDecodeError as error:
        raise ModelError(
            f"{str(file)!r} is not JSON", why=error.msg, where=f"{file}:{error.lineno}"
        ) from None
    if not isinstance(data, dict):
        raise ModelError(f"{str(file)!r} is not a model's configuration", why=f"it holds {a_type(data)}")
    return file, data


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Remarks of transformers on token ids and unused keys say nothing about a plan."""
    _transformers()  # it sets its own level when it loads
    log = logging.getLogger("transformers")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise ModelError(
            "hf: needs the package transformers, which is not installed",
            why="the file names an architecture, and transformers has its code",
            hint=f"pip install transformers, or {OWN_FILE}",
        ) from None
    return transformers


def _config(file: Path, data: dict[str, Any]) -> Any:
    known = _transformers().CONFIG_MAPPING
    kind = data.get("model_type")
    if not isinstance(kind, str):
        shown = ", ".join(list(data)[:8])
        raise ModelError(
            f"{str(file)!r} has no model_type",
            why=f"its keys are: {shown}" if shown else "it is empty",
            hint='add "model_type", such as "llama", "gpt2" or "t5"',
        )
    if kind not in known:
        raise ModelError(
            f"transformers knows no model type {kind!r}",
            why=f"{file} names it" + (", with code of its own" if "auto_map" in data else ""),
            hint=f"{did_you_mean(kind, known.keys())} Or {OWN_FILE}",
        )
    try:
        return known[kind].from_dict(dict(data))
    except Exception as error:  # validation is each configuration's own
        raise ModelError(
            f"{str(file)!r} is not a valid configuration of {kind}",
            why=f"{type(error).__name__}: {' '.join(str(error).split())}",
            hint="compare it with a published configuration of this model",
        ) from None


def _class(file: Path, data: dict[str, Any], config: Any) -> tuple[str, Any]:
    """The kind of model and its class: the one that the file names, else the first that computes a loss."""
    transformers = _transformers()
    tables: dict[str, Mapping[str, Any]] = {
        kind: getattr(transformers.models.auto.modeling_auto, table) for kind, table in KINDS.items()
    }
    named = data.get("architectures") or []
    name = named[0] if isinstance(named, list) and named else None
    if name is not None and not hasattr(transformers, str(name)):  # MPTForCausalLM is MptForCausalLM now
        name = next((n for n in dir(transformers) if n.lower() == str(name).lower()), name)
    if name is not None and not hasattr(transformers, str(name)):
        mine = {n for t in tables.values() for n in _names(t.get(config.model_type, ()))}
        raise ModelError(
            f"transformers has no architecture {name!r}",
            why=f"{file} names it",
            hint=did_you_mean(str(name), mine),
        )
    for kind, table in tables.items():
        if any(name in _names(names) for names in table.values()):
            return kind, getattr(transformers, str(name))
    for kind, table in tables.items():  # none named, or one without a head, which has no loss
        head = name is None or name.endswith(("Model", "PreTrainedModel"))
        if head and config.model_type in table:
            found = _names(table[config.model_type])[0]
            if name is not None:
                log.warning("%s has no loss, so %s is opened", name, found)
            return kind, getattr(transformers, found)
    raise ModelError(
        f"no batch is known for {name or config.model_type}",
        why="hf: opens language models, encoder-decoders, Whisper, masked language models, and classifiers",
        hint=f"{OWN_FILE}, or call mw.plan(model, batch, loss=…){_language_model(data, config, tables['causal'])}",
    )


def _language_model(data: dict[str, Any], config: Any, known: Mapping[str, Any]) -> str:
    """How the language model within another one is planned, if there is one."""
    if config.get_text_config() is config:
        return ""
    inner = data.get("text_config")
    alone = isinstance(inner, dict) and inner.get("model_type") in known
    return "; or plan its language model alone: a config.json " + (
        'with what "text_config" holds' if alone else "of that model"
    )


def _names(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _capturable(model: torch.nn.Module) -> None:
    """Replace Bloom's activation, whose backward is written by hand and cannot be captured, by torch's own: the same
    formula, which saves the same tensor."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child).__name__ == "BloomGelu":
                setattr(parent, name, torch.nn.GELU("tanh"))


def _dtype(config: Any) -> torch.dtype:
    """The dtype that the file gives, else float32."""
    found = getattr(config, "dtype", None)
    found = getattr(torch, found, None) if isinstance(found, str) else found
    return found if isinstance(found, torch.dtype) else torch.float32


def _batch(
    kind: str, config: Any, file: Path, batch: int | None, sequence: int | None
) -> dict[str, torch.Tensor]:
    rows = batch or BATCH
    if kind == "image":
        if sequence is not None:
            raise ModelError("--seq has no meaning for images", why=f"{file} is an image classifier")
        seen = getattr(config, "vision_config", None) or config  # as in CLIP and SigLIP, which also have text
        size = getattr(seen, "image_size", None) or 224
        high, wide = size if isinstance(size, list | tuple) else (size, size)
        pixels = torch.randn(rows, getattr(seen, "num_channels", 3), high, wide, dtype=_dtype(config))
        return {"pixel_values": pixels, "labels": torch.randint(_count(config, "num_labels"), (rows,))}
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    longest = min((v for n in LENGTHS if isinstance(v := getattr(text, n, None), int) and v > 0), default=0)
    relative = kind == "seq2seq" and hasattr(config, "relative_attention_num_buckets")
    if sequence is not None and longest and not relative and sequence > longest:
        raise ModelError(
            f"a sequence of {sequence} tokens is longer than the model's {longest}",
            why=f"{file} says how many positions it has",
            hint=f"--seq {longest} or less",
        )
    fits = SEQUENCE
    while longest and not relative and fits > longest:
        fits //= 2  # some count positions from 2 on (514 for 512), and powers of two can be split
    tokens = sequence or fits
    ids = torch.randint(_count(text, "vocab_size"), (rows, tokens))
    if kind == "speech":  # ids are what is to be written, and the model shifts them for its decoder
        return {"input_features": _sound(config, rows), "labels": ids}
    few = ids % _count(config, "num_labels") if kind in ("classify", "tokens") else ids
    return {"input_ids": ids, "labels": few[:, 0].clone() if kind == "classify" else few.clone()}


def _count(config: Any, name: str) -> int:
    """A number of a configuration, one where it has none."""
    return max(1, getattr(config, name, None) or 1)


def _sound(config: Any, rows: int) -> torch.Tensor:
    """Mel bins by frames, of which the encoder's stride of 2 leaves half."""
    bins, positions = (getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    if bins is None or positions is None:
        raise ModelError(
            f"no batch is known for {config.model_type}",
            why="hf: opens models of speech that read a fixed number of frames of mel bins, as Whisper does",
            hint=OWN_FILE,
        )
    return torch.randn(rows, bins, 2 * positions, dtype=_dtype(config))
