"""Python values that differ between ranks are refused where the program would be another one, under every plan."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.breadth import quick
from tests.habits.plans import NAMES, run

CALLS = """
import logging, os

rank = int(os.environ["RANK"])
scale, told = 1.0 + rank, []
target = torch.full((8,), float(rank))
logging.getLogger("meshwright").addHandler(type("To", (logging.Handler,), {
    "emit": lambda self, record: told.append(record.getMessage())})())

class Dropping(Net):
    def __init__(self, p):
        super().__init__()
        self.drop, self.rank, self.path = torch.nn.Dropout(p), rank, f"/tmp/{rank}"

    def forward(self, x):
        if self.rank > 5:
            return x
        return self.drop(super().forward(x))

def refused(said, call):
    try:
        call()
        raise AssertionError
    except mw.RunError as error:
        assert said in str(error), error
    assert not torch.distributed.is_initialized()

def build(model, loss=loss, batch=batches()[0], **more):
    torch.manual_seed(0)
    return mw.train_step(model, adamw, batch, loss=loss, **PLAN, **more)

of_both = lambda m, b: loss(m, b) * scale
refused("model.drop.p", lambda: build(Dropping((rank + 1) / 10)))
refused("scale", lambda: build(Net(), of_both))
refused("seed=", lambda: build(Net(), seed=rank))
refused("clip_norm=", lambda: build(Net(), clip_norm=1.0 + rank))
weighed = {**batches()[0], "weight": rank + 1}
refused("batch['weight']", lambda: build(Net(), lambda m, b: loss(m, b) * b["weight"], weighed))
refused("scale", lambda: mw.forward_step(Net(), batches()[0], outputs=lambda m, b: m(b["x"]) * scale, mesh={"dp": 2}))

step = build(Dropping(0.0))
step(batches()[1])
step = build(Net(), lambda m, b: loss(m, b) + (m(b["x"]) - target).square().mean())
assert rank or any("target" in one and "rank 0" in one for one in told), told
step(batches()[1])
mw.shutdown()
"""


@pytest.mark.procs
@pytest.mark.parametrize("plan", NAMES)
@quick(lambda plan: plan == "tp")
def test_values_that_differ_between_ranks(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, CALLS)


NOTED = """
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(0)
sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
model = BertForSequenceClassification(BertConfig(vocab_size=16, num_labels=3, **sizes)).eval()
twin = copy.deepcopy(model)
batch = {"input_ids": torch.arange(24).view(4, 6) % 16, "labels": torch.arange(4) % 3}
of_model = lambda model, batch: model(**batch).loss
step = mw.train_step(model, adamw, batch, loss=of_model, mesh={"dp": 2})
assert close(step(batch), of_model(twin, batch).detach())
fewer = {name: x[:2] for name, x in batch.items()}
step(fewer)
step(batch)
mw.shutdown()
"""


@pytest.mark.procs
def test_what_a_library_notes_during_the_capture_is_that_of_all_ranks(tmp_path: Path) -> None:
    """Transformers note the kind of labels in the configuration, where only rank 0 captures at first."""
    run(tmp_path, "dp", NOTED)
