"""Inference from a file: a model on the meta device whose weights each rank reads its shards of."""

from __future__ import annotations

from pathlib import Path

import pytest

import meshwright as mw
from meshwright.core.graph_text import parse
from meshwright.inference.exported import check_operators
from tests.breadth import first, quick
from tests.habits.plans import COMMON, run
from tests.ranks import run_warm

pytestmark = pytest.mark.procs

READS = """
from pathlib import Path
from safetensors.torch import save_file

class Tied(Net):
    # a tied weight, a buffer that is saved and one that is not
    def __init__(self):
        super().__init__()
        self.again = torch.nn.Linear(16, 32, bias=False)
        self.again.weight = self.up.weight
        self.register_buffer("shift", torch.arange(8) / 8)
        self.register_buffer("scale", torch.arange(1, 9) / 4, persistent=False)

    def forward(self, x):
        return (super().forward(x) + self.again(x).sum(-1, keepdim=True) + self.shift) * self.scale

def on_meta():
    with torch.device("meta"):
        return Tied().eval()

batch = batches()[0]
torch.manual_seed(0)
twin = Tied().eval()
twin.shift.mul_(3)
wanted = twin(batch["x"]).detach()
outputs = lambda model, batch: model(batch["x"])
x = {"x": batch["x"]}
rank = int(__import__("os").environ["RANK"])

# a checkpoint of ours, saved under another plan than it is read
step = mw.train_step(copy.deepcopy(twin), adamw, batch, loss=loss, mesh={"dp": 2}, optimizer_parallel=1)
step.save("ours")
state = {n: t.clone() for n, t in twin.state_dict().items() if n != "again.weight"}
if rank == 0:
    save_file(state, "one.safetensors")
    Path("hf").mkdir()
    save_file({n: t for n, t in state.items() if n.startswith("up")}, "hf/model-1.safetensors")
    save_file({n: t for n, t in state.items() if not n.startswith("up")}, "hf/model-2.safetensors")
    where = {n: f"model-{1 if n.startswith('up') else 2}.safetensors" for n in state}
    Path("hf/model.safetensors.index.json").write_text(__import__("json").dumps({"weight_map": where}))
    save_file({n: t.to(torch.bfloat16) for n, t in state.items()}, "half.safetensors")
    save_file({n: t for n, t in state.items() if "norm" not in n}, "lacks.safetensors")
step.forward_step(copy.deepcopy(twin), x, outputs)  # all ranks meet: the files are there

if sys.argv[1] in ("zero3", "pipeline", "auto"):  # what forward steps take from a plan for training
    PLAN = {"plan": mw.plan(on_meta(), {n: t.to("meta") for n, t in batch.items()}, loss=loss, **PLAN)}
for source in ("ours", "one.safetensors", "hf"):
    forward = mw.forward_step(on_meta(), x, outputs=outputs, weights=source, init=Tied, **PLAN)
    assert close(forward(x), wanted), source
if sys.argv[1] == "tp":
    held = sum(t.numel() for t in forward.local.leaves.values())
    assert held < 0.8 * sum(p.numel() for p in twin.parameters()), held

model = on_meta()
model.scale = twin.scale.clone()  # real values of its own: no init= needed
assert close(mw.forward_step(model, x, outputs=outputs, weights="hf", **PLAN)(x), wanted)
assert model.scale.device.type == "cpu"

forward = mw.forward_step(on_meta(), x, outputs=outputs, weights="half.safetensors", init=Tied, cast=True, **PLAN)
half = copy.deepcopy(twin)
half.load_state_dict({n: t.to(torch.bfloat16).float() for n, t in twin.state_dict().items()})
assert close(forward(x), half(batch["x"]).detach())

def refused(word, *args, **how):
    try:
        mw.forward_step(*args, x, outputs=outputs, **{**PLAN, **how})
    except mw.MeshwrightError as error:
        assert word in str(error), str(error)
    else:
        raise AssertionError(word)

refused("cast=True takes", on_meta(), weights="half.safetensors", init=Tied)
refused("no values for 1 buffers of the model: scale", on_meta(), weights="hf")
refused("norm.weight F32[32] is not in the checkpoint", on_meta(), weights="lacks.safetensors", init=Tied)
refused("there is no checkpoint in 'gone'", on_meta(), weights="gone", init=Tied)
if rank == 1:
    data = bytearray(Path("ours/step-00000000/rank00000.safetensors").read_bytes())
    data[int.from_bytes(data[:8], "little") + 16] ^= 1
    Path("ours/step-00000000/rank00000.safetensors").write_bytes(data)
refused("reads weights=", on_meta(), weights="hf" if rank else "one.safetensors", init=Tied)
refused("on the meta device, which holds no values", on_meta())
refused("for a model that has values", twin, weights="hf")
refused("init= without weights=", twin, init=Tied)
refused("not a function that builds", on_meta(), weights="hf", init=twin)
refused("rank00000.safetensors is damaged", on_meta(), weights="ours", init=Tied)
mw.shutdown()
"""


@pytest.mark.parametrize("plan", first(4, ("dp", "tp", "zero3", "pipeline", "auto")))
@quick(lambda plan: plan == "pipeline")
def test_a_model_on_the_meta_device_reads_its_weights(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, READS)


GENERATES = """
import json
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = dict(vocab_size=96, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=128, initializer_range=0.3, pad_token_id=0, eos_token_id=2,
    attention_dropout=0.3)
config = LlamaConfig(**SIZES)
rank = int(__import__("os").environ["RANK"])
torch.manual_seed(0)
model = LlamaForCausalLM(config).eval()
ids = torch.randint(3, 96, (2, 11))
mask = torch.ones_like(ids)
ids[0, :4], mask[0, :4] = 0, 0
if sys.argv[1] == "tp":
    PLAN["pins"] = {f"*{n}_proj": {"n": "tp"} for n in ("q", "k", "v", "gate", "up")}

def equal(generator, label, **how):
    torch.manual_seed(5)
    wanted = model.generate(ids, attention_mask=mask, **how)
    torch.manual_seed(5 + rank)  # rank 0's numbers count, and the other's own go on
    found = generator.generate(ids, attention_mask=mask, **how)
    assert torch.equal(found, wanted), (label, found, wanted)
    if rank:
        after = torch.rand(3)
        torch.manual_seed(5 + rank)
        assert torch.equal(after, torch.rand(3))

if sys.argv[1] == "zero3":  # on the shards of a training step
    batch = {"input_ids": ids, "labels": ids}
    step = mw.train_step(copy.deepcopy(model), adamw, batch, loss=lambda model, batch: model(**batch).loss, **PLAN)
    step(batch)
    own = copy.deepcopy(model)
    generator = step.generator(own, ids)
    own.train()  # programs for other lengths are made in the mode of the first
    model.load_state_dict(step.full_state())
else:
    if rank == 0:
        model.save_pretrained("writing")
        __import__("os").rename("writing", "hf")
    while not __import__("os").path.exists("hf"):
        __import__("time").sleep(0.01)
    with torch.device("meta"):
        empty = LlamaForCausalLM(config).eval()
    generator = mw.generator(empty, {"input_ids": ids}, weights="hf", init=lambda: LlamaForCausalLM(config), **PLAN)
equal(generator, "greedy", max_new_tokens=16)
equal(generator, "sampled", max_new_tokens=12, do_sample=True, temperature=0.8, top_k=20, top_p=0.9)
equal(generator, "eos", max_new_tokens=12, do_sample=True, eos_token_id=list(range(3, 30)), pad_token_id=0)
assert len(generator._programs) == 2, list(generator._programs)
if sys.argv[1] == "tp":
    caches = [p.layout for p in list(generator._programs.values())[1].local.batches.micro_batches[0][-4:]]
    assert [str(c) for c in caches] == ["[2, 2/tp, 32, 8]"] * 4, caches

from transformers.generation import LogitsProcessorList, StoppingCriteriaList
equal(generator, "processors", max_new_tokens=12, logits_processor=LogitsProcessorList([lambda ids, scores: -scores]))
length = ids.shape[1] + 5
stops = StoppingCriteriaList([lambda ids, scores, **_: ids[:, -1] > (96 if rank or ids.shape[1] < length else -1)])
found = generator.generate(ids, attention_mask=mask, max_new_tokens=12, stopping_criteria=stops)
assert found.shape[1] == length  # where rank 0 stops
if rank:  # its clock goes slower
    __import__("transformers.generation.stopping_criteria").generation.stopping_criteria.time.time = lambda: 0.0
found = generator.generate(ids, attention_mask=mask, max_new_tokens=12, max_time=1e-9)
assert found.shape[1] == ids.shape[1] + 1

def refused(word, ids=ids, **how):
    try:
        generator.generate(ids, **how)
    except mw.MeshwrightError as error:
        assert word in str(error), str(error)
    else:
        raise AssertionError(word)

refused("num_beams=2", num_beams=2)
refused("guidance_scale=1.5", guidance_scale=1.5)
refused("rank 1 generates with another max_new_tokens", max_new_tokens=4 + rank)
refused("token ids are int64", ids.float())
if sys.argv[1] in ("dp", "tp"):
    empty.model.norm.variance_epsilon = 1.0
    refused("variance_epsilon", max_new_tokens=2)
mw.shutdown()
"""


@pytest.mark.parametrize("plan", first(2, ("tp", "zero3", "dp", "auto")))
@quick(lambda plan: plan == "tp")
def test_tokens_are_those_of_transformers(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, GENERATES)


EXPORTS = """
import json
from pathlib import Path

x = {"x": batches()[0]["x"], "power": 2}
outputs = lambda model, batch: {"made": [model(batch["x"]) ** batch["power"], batch["x"].sum(-1) + torch.arange(8)]}
rank = int(__import__("os").environ["RANK"])
if sys.argv[2] == "writes":
    torch.manual_seed(0)
    model = Net().eval()
    if sys.argv[1] in ("zero3", "pipeline", "auto"):
        PLAN = {"plan": mw.plan(model, batches()[0], loss=loss, **PLAN)}
    step = mw.forward_step(model, x, outputs=outputs, **PLAN)
    made = step(x)["made"]
    assert close(made[0], model(x["x"]).detach() ** 2)
    mw.export(step, "served")
    if rank == 0:
        torch.save(made, "made.pt")
    step(x)
else:
    del Net
    step = mw.load_exported("served")
    found, wanted = step(x)["made"], torch.load("made.pt", weights_only=True)
    assert all(map(torch.equal, found, wanted))

    def refused(word, do):
        try:
            do()
        except mw.MeshwrightError as error:
            assert word in str(error), str(error)
        else:
            raise AssertionError(word)

    refused("exported for {'power': 2}", lambda: step({**x, "power": 3}))
    refused("exists already", lambda: mw.export(step, "served"))
    mw.export(step, "again")  # a loaded one, too
    names = ["rank-1.safetensors", "forward.json"]
    for name in names:
        data = bytearray(Path("again", name).read_bytes())
        data[-20] ^= 1
        step(x)  # all ranks have read it
        if rank == 1:
            Path("again", name).write_bytes(data)
        step(x)
        refused("damaged", lambda: mw.load_exported("again"))
    refused("mw.export(step, folder)", lambda: mw.load_exported("again"))
mw.shutdown()
"""


@pytest.mark.parametrize("plan", ["dp", "tp", "zero3", "pipeline"])
@quick(lambda plan: plan == "tp")
def test_an_exported_program_runs_without_the_model(tmp_path: Path, plan: str) -> None:
    for part in ("writes", "reads"):
        result = run_warm(tmp_path, 2, COMMON + EXPORTS, plan, part)
        assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    "op",
    [
        "load_library",
        "load_library.x.y",
        "import_module",
        "aten.from_file.default",
        "aten.add",
        "os.system.x",
    ],
)
def test_a_program_from_a_file_names_operators_of_torch_alone(op: str) -> None:
    text = (
        f'graph "M" {{\n  %x: f32[2] = batch("x", batch_dim=0)\n  %y: f32[2] = {op}(%x)\n  return out0=%y\n}}'
    )
    with pytest.raises(mw.MeshwrightError):
        check_operators(parse(text), Path("served"))
