"""Manual mode on simulated ranks: each collective, forward and backward, against one device."""

from __future__ import annotations

import pytest
import torch

from meshwright.errors import StrategyError
from meshwright.manual import ManualStep, World
from meshwright.mesh import Mesh
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
