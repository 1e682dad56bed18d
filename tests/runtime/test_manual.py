"""Manual mode on simulated ranks: each collective, forward and backward, against one device."""

from __future__ import annotations

import copy

import pytest
import torch

from meshwright.core.mesh import Mesh
from meshwright.errors import CaptureError, RunError, StrategyError
from meshwright.manual import ManualStep, World
from meshwright.runtime.communicator import SimulatedWorld

MESH = Mesh.of(dp=2, tp=3)


def test_a_hand_written_tensor_parallel_pair_computes_what_one_device_does() -> None:
    """x whole → copy → columns of w1, rows of w2 → all-reduce, over 3 ranks that 8 columns do not divide by."""
    torch.manual_seed(0)
    x, w1, w2 = (torch.randn(*s, dtype=torch.float64) for s in ((5, 4), (4, 8), (8, 2)))
    one = [t.clone().requires_grad_() for t in (x, w1, w2)]
    (torch.relu(one[0] @ one[1]) @ one[2]).square().sum().backward()

    def body(comm):
        world = World(comm)
        a, b, c = (t.clone().requires_grad_() for t in (x, w1, w2))
        mine1, mine2 = world.slice(b, 1, "tp"), world.slice(c, 0, "tp")
        y = world.all_reduce(torch.relu(world.copy(a, "tp") @ mine1) @ mine2, "tp")
        y.square().sum().backward()
        return a.grad, b.grad, c.grad

    for grads in SimulatedWorld(MESH).run(body):
        for grad, whole in zip(grads, one, strict=True):
            torch.testing.assert_close(grad, whole.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dim", (0, 1))
def test_gather_and_scatter_are_each_others_backward(dim: int) -> None:
    torch.manual_seed(1)
    x = torch.randn(7, 5, dtype=torch.float64)
    weight = torch.randn(7, 5, dtype=torch.float64)

    def body(comm):
        world = World(comm)
        whole = x.clone().requires_grad_()
        part = world.slice(whole, dim, ("dp", "tp")) if dim == 0 else world.slice(whole, dim, "tp")
        axes = ("dp", "tp") if dim == 0 else "tp"
        back = world.all_gather(part, dim, axes, size=x.shape[dim])
        assert torch.equal(back, x)
        summed = world.reduce_scatter(back / world.size(axes), dim, axes)
        torch.testing.assert_close(summed, part)
        (world.all_gather(summed, dim, axes, size=x.shape[dim]) * weight).sum().backward()
        return whole.grad

    # reduce_scatter's gradient is the gathered one, and each of its n terms was 1/n of the whole.
    for grad, n in zip(SimulatedWorld(MESH).run(body), [6 if dim == 0 else 3] * 6, strict=True):
        torch.testing.assert_close(grad, weight / n)


def test_all_to_all_moves_a_split_and_back() -> None:
    x = torch.arange(72.0).reshape(6, 12)

    def body(comm):
        world = World(comm)
        rows = world.slice(x.clone().requires_grad_(), 0, "tp")
        columns = world.all_to_all(rows, 1, 0, "tp")
        assert torch.equal(columns, x[:, 4 * world.index("tp") : 4 * world.index("tp") + 4])
        assert torch.equal(world.all_to_all(columns, 0, 1, "tp"), rows)
        assert torch.equal(world.broadcast(columns * 0 + world.index("tp"), "tp", 2), columns * 0 + 2)
        assert world.all_reduce(torch.tensor(float(world.rank)), ("dp", "tp"), "max").item() == 5
        return True

    assert all(SimulatedWorld(MESH).run(body))


def test_the_reference_s_manual_example_trains_as_one_device() -> None:
    """FEATURES 1.8: each rank takes its slice of the batch; gradients are averaged, parameters of a pattern
    stay local."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).double()
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(0, 3, (12,))
    state = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        value = torch.nn.functional.cross_entropy(model(x), y)
        value.backward()
        optimizer.step()
        losses.append(value.item())

    def body(comm):
        mine = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).double()
        mine.load_state_dict(state)
        world = World(comm)
        step = ManualStep(
            mine,
            lambda p: torch.optim.SGD(p, lr=0.1),
            lambda m, b: torch.nn.functional.cross_entropy(m(b[0]), b[1]),
            world,
        )
        start = 2 * world.rank
        found = [step((x[start : start + 2], y[start : start + 2])).item() for _ in range(3)]
        return found, mine.state_dict()

    for found, trained in SimulatedWorld(MESH).run(body):
        assert found == pytest.approx(losses, rel=1e-12)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(trained[name], value, rtol=1e-12, atol=1e-12)


def test_local_parameters_are_not_reduced_and_a_wrong_pattern_is_refused() -> None:
    def body(comm):
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 2)
        world = World(comm)
        with pytest.raises(StrategyError, match="no parameter matches 'wieght'"):
            ManualStep(
                model,
                lambda p: torch.optim.SGD(p, lr=0.1),
                lambda m, b: m(b).sum(),
                world,
                local_parameters=("wieght",),
            )
        step = ManualStep(
            model,
            lambda p: torch.optim.SGD(p, lr=1.0),
            lambda m, b: m(b).sum(),
            world,
            local_parameters=("weight",),
        )
        before = model.weight.detach().clone()
        step(torch.full((1, 2), float(world.rank)))
        return before - model.weight.detach(), model.bias.grad.clone()

    for rank, (moved, bias) in enumerate(SimulatedWorld(MESH).run(body)):
        torch.testing.assert_close(moved, torch.full((2, 2), float(rank)))
        torch.testing.assert_close(bias, torch.ones(2))


class Branches(torch.nn.Module):
    """Which of its linears an input takes is a matter of the batch; `idle` is taken by none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.idle = (torch.nn.Linear(3, 3).double() for _ in range(3))
        self.norm = torch.nn.BatchNorm1d(3).double()

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return (self.second if branch else self.first)(x)


def branch_loss(model, batch):
    x, branch = batch
    return model(x, branch).square().mean()


def decayed(parameters):
    """Momentum and decay move a parameter whose gradient is 0, and leave one without a gradient alone."""
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


def plain_steps(model, batches, clip=None):
    """The mean over the ranks' batches, accumulated over calls, as one device has it; the norms before clipping."""
    optimizer, norms = decayed(model.parameters()), []
    for calls in batches:
        optimizer.zero_grad()
        for of_ranks in calls:
            sum(branch_loss(model, b) for b in of_ranks).div(len(of_ranks)).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9))
        optimizer.step()
    return norms


@pytest.mark.parametrize("bucket_bytes", (0, 100, 25 << 20))
@pytest.mark.parametrize("clip", (None, 0.05))
def test_accumulation_and_unused_parameters_equal_one_device(bucket_bytes: int, clip: float | None) -> None:
    """Two ranks take different branches, with batches of other sizes, and accumulate over calls."""
    torch.manual_seed(0)
    model = Branches()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    takes = [
        [(0, 1), (0, 0)],
        [(0, 0)],
        [(1, 0), (1, 1), (0, 1)],
        [(1, 1)],
    ]  # steps → calls → branch of each rank
    batches = [
        [[(torch.randn(2 + n, 3, dtype=torch.float64), b) for b in ranks] for n, ranks in enumerate(calls)]
        for calls in takes
    ]
    norms = plain_steps(model, batches, clip)

    def body(comm):
        mine = Branches()
        mine.load_state_dict(state)
        world = World(comm)
        step = ManualStep(mine, decayed, branch_loss, world, bucket_bytes=bucket_bytes, clip_norm=clip)
        found = []
        for number, calls in enumerate(batches):
            *before, last = [of_ranks[world.rank] for of_ranks in calls]
            for batch in before:
                if number % 2:
                    step(batch, update=False)
                else:
                    with step.no_sync():
                        step(batch)
            step(last)
            assert mine.idle.weight.grad is None
            found.append(step.grad_norm if clip else None)
        return found, mine.state_dict()

    for found, trained in SimulatedWorld(Mesh.of(dp=2)).run(body):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(trained[name], value, rtol=1e-12, atol=1e-12)
        if clip:
            torch.testing.assert_close(torch.stack(found), torch.stack(norms), rtol=1e-12, atol=1e-12)


def test_buffers_are_those_of_the_first_rank_and_evaluation_changes_none() -> None:
    def of_norm(model, batch):
        return model.norm(batch).square().mean() + model.norm.running_mean.sum().detach()

    torch.manual_seed(0)  # ranks are threads, which share one generator
    made, given = Branches(), torch.randn(4, 3, dtype=torch.float64)

    def body(comm, broadcast_buffers):
        model, world = copy.deepcopy(made), World(comm)
        model.idle.eval()
        step = ManualStep(model, decayed, of_norm, world, broadcast_buffers=broadcast_buffers)
        x = given + world.rank
        step(x)
        state = {k: v.clone() for k, v in model.state_dict().items()}
        value = step.evaluate(x)
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert model.training and model.norm.training and not model.idle.training
        model.eval()
        torch.testing.assert_close(value, world.all_reduce(of_norm(model, x).detach(), "dp", "avg"))
        return model.norm.running_mean.clone(), int(model.norm.num_batches_tracked)

    one, two = SimulatedWorld(Mesh.of(dp=2)).run(lambda comm: body(comm, True))
    assert torch.equal(one[0], two[0]) and one[1] == two[1] == 1
    of_their_own = SimulatedWorld(Mesh.of(dp=2)).run(lambda comm: body(comm, False))
    assert torch.equal(of_their_own[0][0], one[0]) and not torch.equal(of_their_own[1][0], one[0])


def test_a_rank_s_own_parameters_count_apart_in_the_norm() -> None:
    def body(comm):
        model = torch.nn.Linear(2, 1, bias=True)
        torch.nn.init.zeros_(model.weight)
        world = World(comm)
        step = ManualStep(
            model, lambda p: torch.optim.SGD(p, lr=1.0), lambda m, b: m(b).sum(), world,
            local_parameters=("weight",), clip_norm=1.0,
        )  # fmt: skip
        with pytest.raises(RunError, match="no step has been done"):
            _ = step.grad_norm
        step(torch.full((1, 2), 1.0 + world.rank))
        return step.grad_norm.item(), model.weight.grad[0, 0].item()

    # gradients: weights [1, 1] and [2, 2], the bias 1 on both: 2 + 8 + 1
    for rank, (norm, clipped) in enumerate(SimulatedWorld(Mesh.of(dp=2)).run(body)):
        assert norm == pytest.approx(11**0.5) and clipped == pytest.approx((1 + rank) / 11**0.5, rel=1e-5)


def test_outputs_come_back_beside_the_loss_without_a_graph() -> None:
    def with_outputs(model, batch):
        y = model(batch)
        return y.mean(), {"y": y, "rows": [len(batch)]}

    def body(comm):
        torch.manual_seed(0)
        model, world = torch.nn.Linear(2, 2), World(comm)
        step = ManualStep(model, lambda p: torch.optim.SGD(p, lr=0.0), with_outputs, world)
        x = torch.full((1 + world.rank, 2), float(world.rank))
        for value, outputs in (step(x), step.evaluate(x)):
            assert outputs["rows"] == [1 + world.rank] and not outputs["y"].requires_grad
            torch.testing.assert_close(outputs["y"], model(x).detach())
            torch.testing.assert_close(value, world.all_reduce(outputs["y"].mean(), "dp", "avg"))
        return len(step(x, update=False)) == 2

    assert all(SimulatedWorld(Mesh.of(dp=2)).run(body))


def test_what_a_manual_step_cannot_do_is_refused() -> None:
    def body(comm):
        world, model = World(comm), torch.nn.Linear(2, 2)
        model.bias.requires_grad_(False)

        def made(loss=lambda m, b: m(b).sum(), **options):
            return ManualStep(model, lambda p: torch.optim.SGD(p, lr=1.0), loss, world, **options)

        step, x = made(), torch.ones(1, 2)
        step(x)
        with pytest.raises(RunError, match="clip_norm= was not given"):
            _ = step.grad_norm
        model.bias.requires_grad_(True)
        with pytest.raises(RunError, match="bias is not a parameter that this step trains"):
            step(x)
        model.bias.requires_grad_(False)
        model.weight = torch.nn.Parameter(torch.ones(2, 2))
        with pytest.raises(RunError, match="weight is not a parameter"):
            step(x)
        with pytest.raises(CaptureError, match="not a scalar"):
            made(lambda m, b: m(b))(x)
        with pytest.raises(StrategyError, match="not reduced over tp"):
            made(reduce_over="dp", clip_norm=1.0)
        with pytest.raises(RunError, match="bucket_bytes=-1"):
            made(bucket_bytes=-1)
        return True

    assert all(SimulatedWorld(Mesh.of(dp=1, tp=2)).run(body))
