"""MODEL of the command line: files, Hugging Face configurations, examples, and what is said when they are wrong."""

from __future__ import annotations

import json
import socket

import pytest
import torch

import meshwright as mw
from meshwright.cli.model import open_model
from meshwright.compile import captured_of, default_loss
from meshwright.errors import CaptureError, ModelError
from meshwright.plan.plan import fingerprint
from tests.breadth import first

WIDE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 96,
}  # fmt: skip
CONFIGS = {
    "gpt2": {"architectures": ["GPT2LMHeadModel"], "n_layer": 1, "n_head": 4, "n_embd": 32, "vocab_size": 96,
             "n_positions": 40},
    "llama": {"architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", "num_key_value_heads": 2, **WIDE},
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4, **WIDE},
    "t5": {"num_layers": 1, "num_heads": 4, "d_model": 32, "d_kv": 8, "d_ff": 64, "vocab_size": 96},
    "bert": {"architectures": ["BertModel"], **WIDE},
    "vit": {"image_size": 32, "patch_size": 8, **WIDE},
}  # fmt: skip
CLASSES = {
    "gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mixtral": "MixtralForCausalLM",
    "t5": "T5ForConditionalGeneration", "bert": "BertForMaskedLM", "vit": "ViTForImageClassification",
}  # fmt: skip
FILE = """
import torch
from torch import nn

def build(*, batch=4, sequence=8):
    model = nn.Linear(8, 4)
    return model, torch.zeros(batch, sequence, 8), lambda model, x: model(x).mean()

def two():
    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(x).mean()
    return Net(8, 4), torch.zeros(4, 8)

def fixed():
    return two()

def number():
    return 3

def no_module():
    return torch.zeros(2), torch.zeros(2), None

def no_loss():
    return (*two(), 0.5)

def fails():
    raise RuntimeError("no such thing")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "net.py"
    path.write_text(FILE)
    return path


def config(tmp_path, name, **changes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": name, **CONFIGS.get(name, {}), **changes}))
    return path


def refused(target, **shape):
    with pytest.raises(ModelError) as caught:
        open_model(str(target), **shape)
    return str(caught.value)


# ---------------------------------------------------------------- configurations


@pytest.mark.zoo
@pytest.mark.parametrize("name", first(1, CONFIGS))
def test_a_configuration_alone_gives_the_plan_of_the_real_model(tmp_path, name, monkeypatch):
    def no_network(*_args, **_kwargs):
        raise AssertionError("something was looked up")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    opened = open_model(f"hf:{config(tmp_path, name)}", batch=4, sequence=None if name == "vit" else 16)
    assert type(opened.model).__name__ == CLASSES[name]
    assert all(p.is_meta for p in opened.model.parameters())
    assert {x.shape[0] for x in opened.batch.values()} == {4}
    plan = mw.plan(opened.model, opened.batch, loss=opened.loss, mesh={"dp": 2, "tp": 2})

    real = type(opened.model)(opened.model.config).to(next(opened.model.parameters()).dtype).train()
    batch = {k: torch.zeros(v.shape, dtype=v.dtype) for k, v in opened.batch.items()}
    graph = captured_of(real, batch, opened.loss).graph
    assert list(plan.strategies) == [n.name for n in graph.nodes]
    if name != "mixtral":  # transformers counts tokens of an expert in another dtype on a CPU than elsewhere
        assert plan.fingerprint == fingerprint(graph)


def test_the_folder_of_a_configuration_is_enough_and_the_length_follows_from_it(tmp_path):
    config(tmp_path, "gpt2")
    opened = open_model(f"hf:{tmp_path}")
    assert opened.batch["input_ids"].shape == (8, 32)  # of 40 positions: a power of two can be cut
    assert next(opened.model.parameters()).dtype is torch.float32


def test_the_dtype_is_that_of_the_file(tmp_path):
    opened = open_model(f"hf:{config(tmp_path, 'llama')}")
    assert {p.dtype for p in opened.model.parameters()} == {torch.bfloat16}
    assert opened.batch["input_ids"].shape == (8, 1024)


def test_images_are_of_the_size_that_the_vision_part_reads(tmp_path):
    small = {**WIDE, "image_size": 24, "patch_size": 8}
    file = config(
        tmp_path,
        "siglip",
        architectures=["SiglipForImageClassification"],
        vision_config=small,
        text_config={**WIDE, "max_position_embeddings": 8},
    )
    opened = open_model(f"hf:{file}", batch=4)
    assert opened.batch["pixel_values"].shape == (4, 3, 24, 24)
    mw.plan(opened.model, opened.batch, loss=opened.loss, mesh={"dp": 2})


def test_speech_is_as_many_frames_as_the_encoder_reads_beside_the_words(tmp_path):
    sizes = {
        "d_model": 32,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "pad_token_id": 0,
    }
    sizes |= {
        "decoder_attention_heads": 2,
        "vocab_size": 64,
        "max_source_positions": 12,
        "max_target_positions": 8,
    }
    opened = open_model(f"hf:{config(tmp_path, 'whisper', num_mel_bins=20, **sizes)}", batch=4)
    assert {k: tuple(v.shape) for k, v in opened.batch.items()} == {
        "input_features": (4, 20, 24), "labels": (4, 8),
    }  # fmt: skip
    mw.plan(opened.model, opened.batch, loss=opened.loss, mesh={"dp": 2})
    assert "frames of mel bins" in refused(f"hf:{config(tmp_path, 'speech_to_text')}")


def test_bloom_is_planned_though_its_activation_has_a_backward_of_its_own(tmp_path):
    opened = open_model(
        f"hf:{config(tmp_path, 'bloom', hidden_size=32, n_layer=1, n_head=2, vocab_size=64)}", batch=4
    )
    ours = next(m for n, m in opened.model.named_modules() if n.endswith("gelu_impl"))
    real = type(opened.model)(opened.model.config).transformer.h[0].mlp.gelu_impl
    x, y = (torch.linspace(-4, 4, 99, dtype=torch.float64).requires_grad_() for _ in range(2))
    ours(x).sum().backward()
    real(y).sum().backward()
    assert torch.allclose(ours(x), real(y), atol=1e-7) and torch.allclose(x.grad, y.grad, atol=1e-7)
    assert "gelu" in str(
        list(mw.plan(opened.model, opened.batch, loss=opened.loss, mesh={"dp": 2}).strategies)
    )


def test_wrong_configurations_say_what_is_wrong(tmp_path):
    assert "cannot be read" in refused(f"hf:{tmp_path / 'none.json'}")
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in refused(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text("[]")
    assert "holds a list" in refused(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    assert "no model_type" in refused(f"hf:{tmp_path}")
    assert "did you mean 'llama'" in refused(f"hf:{config(tmp_path, 'lama')}")
    text = refused(f"hf:{config(tmp_path, 'llama', architectures=['LlamaForCasualLM'])}")
    assert "no architecture 'LlamaForCasualLM'" in text and "did you mean 'LlamaForCausalLM'" in text
    text = refused(f"hf:{config(tmp_path, 'llama', num_attention_heads='four')}")
    assert "not a valid configuration of llama" in text and "num_attention_heads" in text
    text = refused(f"hf:{config(tmp_path, 'llama', hidden_act='swiglu')}")
    assert (
        "KeyError: 'swiglu'" in text
        and "compare hidden_act with" in text
        and "config.json: hidden_act" in text
    )


def test_a_class_may_be_named_in_other_case(tmp_path):
    sizes = {"d_model": 32, "n_heads": 2, "n_layers": 1, "vocab_size": 64, "max_seq_len": 16}
    opened = open_model(f"hf:{config(tmp_path, 'mpt', architectures=['MPTForCausalLM'], **sizes)}")
    assert type(opened.model).__name__ == "MptForCausalLM"
    assert opened.batch["input_ids"].shape == (8, 16)


def test_a_model_without_a_known_batch_is_told_how_it_can_be_planned(tmp_path):
    text = refused(f"hf:{config(tmp_path, 'wav2vec2')}")
    assert "no batch is known for" in text and "file.py:function, or call mw.plan(model, batch" in text
    assert "language model alone" not in text
    text = refused(f"hf:{config(tmp_path, 'llava', text_config={'model_type': 'mistral'})}")
    assert 'language model alone: a config.json with what "text_config" holds' in text
    text = refused(f"hf:{config(tmp_path, 'qwen2_vl', hidden_size=32)}")
    assert "language model alone: a config.json of that model" in text


def test_a_sequence_longer_than_the_model_is_refused(tmp_path):
    text = refused(f"hf:{config(tmp_path, 'gpt2')}", sequence=64)
    assert "64 tokens is longer than the model's 40" in text
    assert "--seq has no meaning" in refused(f"hf:{config(tmp_path, 'vit')}", sequence=64)


def test_without_transformers_a_configuration_asks_for_it(tmp_path, monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "transformers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    path = config(tmp_path, "gpt2")
    monkeypatch.setattr(builtins, "__import__", without)
    assert "pip install transformers" in refused(f"hf:{path}")


# ---------------------------------------------------------------- files


def test_a_function_gives_model_batch_and_loss_in_the_shape_asked_for(file):
    opened = open_model(f"{file}:build", batch=6, sequence=10)
    assert opened.batch.shape == (6, 10, 8)
    assert opened.loss(opened.model, opened.batch).shape == ()


def test_two_things_are_enough(file):
    assert open_model(f"{file}:two").loss is default_loss


def test_wrong_files_and_functions_say_what_is_wrong(file, tmp_path):
    assert "did you mean 'net.py'" in refused(tmp_path / "nett.py:build")
    text = refused(f"{file}:biuld")
    assert "no function 'biuld'" in text and "did you mean 'build'" in text
    assert f"{file}:build" in refused(file)  # a function was forgotten: the likely one is named
    assert "returned an int" in refused(f"{file}:number")
    assert "first thing" in refused(f"{file}:no_module") and "is a Tensor" in refused(f"{file}:no_module")
    assert "third thing" in refused(f"{file}:no_loss")
    text = refused(f"{file}:fails")
    assert "RuntimeError: no such thing" in text and 'net.py:28  raise RuntimeError("no such thing")' in text
    assert "does not take 'batch'" in refused(f"{file}:fixed", batch=3)
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\n\ndef f(:\n")
    text = refused(f"{broken}:f")
    assert "cannot be imported" in text and "broken.py:3" in text
    assert "does not name a model" in refused("gpt2")
    assert "hf:config.json" in refused("config.json")


def test_functions_that_need_no_argument_are_proposed_and_what_is_not_named_is_counted(tmp_path):
    path = tmp_path / "many.py"
    path.write_text("def loss(model, batch): ...\n" + "".join(f"def f{n}(): ...\n" for n in range(10)))
    text = refused(f"{path}:nope")
    assert "and 3 more" in text and "known: f0" in text and "'loss'" not in text.partition("known")[2]


@pytest.mark.parametrize("batch", ["x", "(x, x)"])
def test_where_the_loss_is_missing_it_is_said_what_to_return(batch, tmp_path):
    path = tmp_path / "lossless.py"
    path.write_text(
        f"import torch\n\ndef build():\n    x = torch.ones(4, 8)\n    return torch.nn.Linear(8, 8), {batch}\n"
    )
    opened = open_model(f"{path}:build")
    with pytest.raises(CaptureError) as error:
        captured_of(opened.model, opened.batch, opened.loss)
    assert "no loss was given" in error.value.why and "return model, batch, loss" in error.value.hint


def test_a_hugging_face_model_without_labels_is_said_to_lack_them(tmp_path):
    opened = open_model(f"hf:{config(tmp_path, 'llama')}")
    with pytest.raises(CaptureError, match="not a scalar tensor") as error:
        captured_of(opened.model, {"input_ids": opened.batch["input_ids"]}, default_loss)
    assert error.value.hint.startswith("labels in the batch")


def test_examples_open_by_name():
    assert open_model("zoo:mlp", batch=8).batch["x"].shape == (8, 16)
    assert open_model("zoo:gpt2", batch=2, sequence=16).batch["input_ids"].shape == (2, 16)
    assert "did you mean 'gpt2'" in refused("zoo:gtp2")


def test_a_model_without_a_head_is_opened_with_one_and_a_remark(tmp_path, caplog):
    with caplog.at_level("WARNING", logger="meshwright"):
        open_model(f"hf:{config(tmp_path, 'llama')}")
        assert not caplog.messages
        opened = open_model(f"hf:{config(tmp_path, 'bert')}")
    assert type(opened.model).__name__ == "BertForMaskedLM"
    assert caplog.messages == ["BertModel has no loss, so BertForMaskedLM is opened"]
