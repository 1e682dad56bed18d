"""One sharded state, many programs: shapes that change, several losses and optimizers, what trains, which mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.breadth import quick
from tests.habits.plans import NAMES, run

pytestmark = pytest.mark.procs

ASKS = """
def asking(model, batch):
    found = loss(model, batch)
    return found * 2 if batch["x"].is_contiguous() else found * 3 if batch["x"].requires_grad else found

torch.manual_seed(0)
model = Net()
twin = copy.deepcopy(model)
optimizer = adamw(twin.parameters())
step = mw.train_step(model, adamw, batches()[0], loss=asking, **PLAN)
for batch in batches(6)[1:]:
    x = batch["x"].t().contiguous().t()
    for x in (batch["x"], x, x.detach().requires_grad_()):
        changed = {**batch, "x": x}
        expected = asking(twin, changed)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert close(step(changed), expected.detach())
assert len(step._programs.recent) == 3
mw.shutdown()
"""

SHAPES = """
torch.manual_seed(0)
model = Net()
twin = copy.deepcopy(model)
optimizer = adamw(twin.parameters())
step = mw.train_step(model, adamw, batches()[0], loss=loss, **PLAN)
sizes = (8, 6, 8, 3, 6, 1, 8)  # of which some are too small for micro-batches
for rows in sizes:
    batch = batches(1, rows)[0]
    expected = loss(twin, batch)
    optimizer.zero_grad()
    expected.backward()
    optimizer.step()
    assert close(step(batch), expected.detach()), rows
assert step.steps == len(sizes)
state = step.full_state()
assert all(close(state[n], p.detach()) for n, p in twin.named_parameters())
evaluate = step.forward_step(model, batches()[0], outputs=loss)
for batch in (batches(1, rows)[0] for rows in (8, *sizes[:-2])):
    assert close(evaluate(batch), loss(twin, batch).detach()), len(batch["x"])
mw.shutdown()
"""

RECURRENT = """
class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cells = torch.nn.LSTM(16, 16, batch_first=True)  # keeps a list of its weights beside them
        self.up = torch.nn.Linear(16, 8)

    def forward(self, x):
        return self.up(self.cells(x)[0][:, -1])

torch.manual_seed(0)
model = Recurrent()
twin = copy.deepcopy(model)
optimizer = adamw(twin.parameters())
examples = [{"x": torch.randn(8, length, 16), "y": torch.arange(8)} for length in (3, 5, 3, 4)]
step = mw.train_step(model, adamw, examples[0], loss=loss, **PLAN)
for batch in examples:
    optimizer.zero_grad()
    expected = loss(twin, batch)
    expected.backward()
    optimizer.step()
    assert close(step(batch), expected.detach())
mw.shutdown()
"""

GAN = """
class Gan(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.g = Net()
        self.d = torch.nn.Sequential()
        self.d.up = torch.nn.Linear(8, 16)
        self.d.act = torch.nn.Tanh()
        self.d.down = torch.nn.Linear(16, 1)

def d_loss(model, batch):
    real = model.d(F.one_hot(batch["y"], 8).float())
    with torch.no_grad():
        made = model.g(batch["x"])
    fake = model.d(made)
    return F.softplus(-real).mean() + F.softplus(fake).mean()

def g_loss(model, batch):
    return F.softplus(-model.d(model.g(batch["x"]))).mean()

def of(prefix):
    return lambda parameters: adamw([p for n, p in parameters.named() if n.startswith(prefix)])

torch.manual_seed(0)
model = Gan()
twin = copy.deepcopy(model)
optimizers = [adamw(twin.d.parameters()), adamw(twin.g.parameters())]
steps = [
    mw.train_step(model, of(prefix), batches()[0], loss=objective, clip_norm=0.05, **PLAN)
    for prefix, objective in (("d.", d_loss), ("g.", g_loss))
]
for batch in batches():
    for step, optimizer, objective in zip(steps, optimizers, (d_loss, g_loss)):
        expected = objective(twin, batch)
        optimizer.zero_grad()
        expected.backward()
        norm = torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 0.05)
        optimizer.step()
        assert close(step(batch), expected.detach()), objective
        assert close(step.grad_norm, norm), objective  # of what this optimizer updates alone
state = steps[0].full_state()
assert set(state) == set(twin.state_dict())
assert all(close(state[n], p.detach()) for n, p in twin.named_parameters())
steps[0].save("d"), steps[1].save("g")
steps[0].load("d"), steps[1].load("g")
again = steps[1].full_state()
assert all(torch.equal(again[n], state[n]) for n in state)
mw.shutdown()
"""

FREEZE = """
torch.manual_seed(0)
model = Net()
twin = copy.deepcopy(model)
for one in (model, twin):
    one.up.requires_grad_(False)
optimizer = adamw(twin.parameters())
step = mw.train_step(model, adamw, batches()[0], loss=loss, **PLAN)
for number, batch in enumerate(batches(6)):
    for one in (model, twin):
        one.up.requires_grad_(number % 3 > 0)
        one.down.requires_grad_(number != 4)
    expected = loss(twin, batch)
    optimizer.zero_grad()
    expected.backward()
    optimizer.step()
    assert close(step(batch), expected.detach()), number
state = step.full_state()
assert all(close(state[n], p.detach()) for n, p in twin.named_parameters())
step.save("ckpt")
step.load("ckpt")
mw.shutdown()
"""

MODE = """
class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(16, 32)
        self.norm = torch.nn.BatchNorm1d(32)
        self.down = torch.nn.Linear(32, 8)
    def forward(self, x):
        return self.down(torch.relu(self.norm(self.up(x))))

torch.manual_seed(0)
model = Normed()
twin = copy.deepcopy(model)
optimizer = adamw(twin.parameters())
step = mw.train_step(model, adamw, batches()[0], loss=loss, **PLAN)
for number, batch in enumerate(batches(5)):
    for one in (model, twin):
        one.train(number % 2 == 0)
    expected = loss(twin, batch)
    optimizer.zero_grad()
    expected.backward()
    optimizer.step()
    assert close(step(batch), expected.detach()), number
state = step.full_state()
assert all(close(state[n].float(), x.float()) for n, x in twin.state_dict().items() if "tracked" not in n)
mw.shutdown()
"""


@pytest.mark.parametrize("plan", [*NAMES, "zero1", "zero1 host", "zero2", "pipeline", "micro", "halves"])
@quick(lambda plan: plan in ("tp", "pipeline", "micro"))
def test_batches_of_other_shapes_train_the_same_weights(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, SHAPES)


def test_what_code_asks_of_a_batch_tensor(tmp_path: Path) -> None:
    run(tmp_path, "dp", ASKS)


@pytest.mark.parametrize("plan", ["dp", "zero3"])
@quick(lambda plan: plan == "dp")
def test_sequences_of_other_lengths_in_a_recurrent_model(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, RECURRENT)


@pytest.mark.parametrize("plan", [*NAMES, "zero2"])
@quick(lambda plan: plan == "tp")
def test_two_optimizers_train_one_model_in_turn(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, GAN)


@pytest.mark.parametrize("plan", [*NAMES, "zero1", "zero1 host", "zero2"])
@quick(lambda plan: plan in ("tp", "zero2"))
def test_what_is_frozen_or_unfrozen_after_the_build_is_honoured(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, FREEZE)


@pytest.mark.parametrize("plan", NAMES)
@quick(lambda plan: plan != "dp")
def test_train_and_eval_are_programs_of_one_state(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, MODE)


LENGTHS = """
class Text(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(32, 16)
        self.net = Net()
    def forward(self, ids):
        return self.net(self.table(ids).cumsum(1))

def objective(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())

class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 22
    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        n = 3 + int(torch.randint(4, (), generator=g))
        return {"ids": torch.randint(32, (n,), generator=g), "labels": torch.randint(8, (n,), generator=g)}

def collate(samples):
    padded = lambda key, value: torch.nn.utils.rnn.pad_sequence([s[key] for s in samples], True, value)
    return {"ids": padded("ids", 0), "labels": padded("labels", -100)}

def loader():
    shuffled = torch.Generator().manual_seed(3)
    return torch.utils.data.DataLoader(Sentences(), 8, shuffle=True, collate_fn=collate, generator=shuffled)

torch.manual_seed(0)
model = Text()
twin = copy.deepcopy(model)
optimizer = adamw(twin.parameters())
example = {"ids": torch.zeros(8, 6, dtype=torch.int64), "labels": torch.zeros(8, 6, dtype=torch.int64)}
step = mw.train_step(model, adamw, example, loss=objective, **PLAN)
pad = mw.pad_to([4, 6])
count = 0
for given, batch in zip(mw.shard_loader(loader(), step, whole=True), loader(), strict=True):
    expected = objective(twin, batch)
    optimizer.zero_grad()
    expected.backward()
    optimizer.step()
    assert close(step(pad(given)), expected.detach()), count
    count += 1
assert count == 3
rows = torch.utils.data.TensorDataset(example["ids"].repeat(3, 1)[:22], example["labels"].repeat(3, 1)[:22])
as_dict = lambda samples: {"ids": torch.stack([a for a, _ in samples]), "labels": torch.stack([b for _, b in samples])}
plain = torch.utils.data.DataLoader(rows, 8, collate_fn=as_dict)
for given, batch in zip(mw.shard_loader(plain, step), plain, strict=True):
    expected = objective(twin, batch)
    optimizer.zero_grad()
    expected.backward()
    optimizer.step()
    assert close(step(given), expected.detach())
mw.shutdown()
"""


@pytest.mark.parametrize("plan", NAMES)
@quick(lambda plan: plan != "dp")
def test_loaders_follow_lengths_and_a_last_batch(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, LENGTHS)


EVALUATION = """
torch.manual_seed(0)
model = Net()
twin = copy.deepcopy(model)
step = mw.train_step(model, adamw, batches()[0], loss=loss, **PLAN)
step(batches()[0])
optimizer = adamw(twin.parameters())
loss(twin, batches()[0]).backward()
optimizer.step()
forward = step.forward_step(model.eval(), batches()[0], outputs=lambda model, batch: model(batch["x"]))
for rows in (8, 5, 3, 1, 8, 5):
    batch = batches(1, rows)[0]
    assert close(forward(batch), twin(batch["x"]).detach()), rows
mw.shutdown()
"""


@pytest.mark.parametrize("plan", [*NAMES, "pipeline"])
@quick(lambda plan: plan != "dp")
def test_evaluation_takes_batches_of_other_shapes(tmp_path: Path, plan: str) -> None:
    run(tmp_path, plan, EVALUATION)
