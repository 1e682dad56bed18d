"""Randomness: exact masks do not depend on the cut, fast ones agree where values are whole, eager can be given ours."""

from dataclasses import replace

import pytest
import torch

from meshwright.core.layout_text import parse_layout
from meshwright.core.mesh import Mesh
from meshwright.errors import RuleError
from meshwright.ops.local import localize
from meshwright.ops.strategy import UNSHARDED, layouts
from meshwright.runtime.communicator import Alone, SimulatedWorld
from meshwright.runtime.kernels import KERNELS, exact_dropout_mask, kernel, reference_dropout
from meshwright.runtime.kernels.random import uniform_at
from meshwright.runtime.rank import Rank
from tests.ops.prove import assemble, sample, scatter

CPU = torch.device("cpu")
MESH = Mesh.of(a=2, b=3)


def dropped(layout_text, exact, step=0, micro_batch=0, slot=0):
    """What every rank of the mesh makes of ones, in one of two micro-batches."""
    layout, timed = parse_layout(layout_text), MESH.in_time(2)
    pieces = scatter(torch.ones(layout.shape, dtype=torch.float64), layout, timed, 0)
    pieces = pieces[micro_batch * MESH.size :]

    def body(simulated):
        rank = Rank(simulated, CPU, seed=5, exact=exact, step=step, micro_batch=micro_batch)
        rank.runs_on(timed)
        return KERNELS["meshwright.dropout"](rank, pieces[rank.comm.rank], 0.5, slot, layout_text)

    return SimulatedWorld(MESH).run(body)


@pytest.mark.parametrize(
    "text", ["[12, 10]", "[12/a, 10]", "[(4 3/b), 10/a]", "[12, (2/a 5/b)]", "[12/a.b, 10]"]
)
def test_an_exact_mask_does_not_depend_on_the_cut(text):
    got = assemble(dropped(text, exact=True), parse_layout(text), MESH)
    assert torch.equal(got, exact_dropout_mask((12, 10), 0.5, seed=5, slot=0) * 2.0)


def test_a_fast_mask_agrees_where_the_value_is_whole_and_differs_where_it_is_split():
    pieces = dropped("[12/a, 10]", exact=False)
    by_half = [[p for r, p in enumerate(pieces) if MESH.coordinate(r)["a"] == half] for half in (0, 1)]
    for half in by_half:
        assert all(torch.equal(p, half[0]) for p in half)
    assert not torch.equal(by_half[0][0], by_half[1][0])


@pytest.mark.parametrize("exact", [True, False])
def test_masks_differ_by_step_micro_batch_and_slot_and_repeat_on_recompute(exact):
    text = "[12/time, 10]"
    masks = [dropped(text, exact, **kw)[0] for kw in ({}, {"step": 1}, {"micro_batch": 1}, {"slot": 1})]
    assert torch.equal(masks[0], dropped(text, exact)[0])
    for i in range(4):
        for j in range(i):
            assert not torch.equal(masks[i], masks[j])


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_whole_in_time_is_drawn_alike_in_every_micro_batch(exact):
    """A mask on a parameter is one mask, whichever micro-batch asks for it."""
    first, second = (dropped("[12/a, 10]", exact, micro_batch=m) for m in (0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_hash_is_uniform():
    u = uniform_at(torch.arange(200_000), key=17)
    assert u.min() >= 0
    assert u.max() < 1
    # Five standard deviations of a mean and of a correlation with the next element.
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / 200_000) ** 0.5
    centred = u - 0.5
    assert abs((centred[1:] * centred[:-1]).mean() * 12) < 5 / 200_000**0.5
    counts = torch.histc(u, 16, 0, 1)
    assert (counts - 12_500).abs().max() < 5 * (12_500 * 15 / 16) ** 0.5


class Tiny(torch.nn.Module):
    """Dropout in a module, in a function, and in attention."""

    def __init__(self):
        super().__init__()
        self.first, self.idle = torch.nn.Dropout(0.3), torch.nn.Dropout(0.0)

    def forward(self, x):
        """All kinds once; the idle one takes no slot."""
        x = self.idle(self.first(x))
        x = torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.2, is_causal=True)
        return torch.nn.functional.dropout(x, 0.4)


def test_an_eager_model_draws_our_masks_in_the_order_of_execution():
    torch.manual_seed(0)
    x, model = torch.randn(2, 3, 5, 8, dtype=torch.float64), Tiny()
    with reference_dropout(seed=9, step=2) as mode:
        got = model(x)
    assert mode.slot == 3
    rank = Rank(Alone(Mesh.of()), CPU, seed=9, exact=True, step=2)
    y = kernel("meshwright.dropout")(rank, x, 0.3, 0, "[2, 3, 5, 8]")
    y = kernel("meshwright.attention_dropout")(rank, y, y, y, None, 0.2, True, 1, "[2, 3, 5, 5]")
    y = kernel("meshwright.dropout")(rank, y, 0.4, 2, "[2, 3, 5, 8]")
    torch.testing.assert_close(got, y, rtol=1e-14, atol=1e-14)


def test_dropout_inside_a_torch_function_draws_our_masks_too():
    """`F.multi_head_attention_forward` drops in its own body, where a function mode does not look."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.3, batch_first=True).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)

    def draw(seed):
        with reference_dropout(seed=seed) as mode:
            return layer(x), mode.slot

    (first, slots), (again, _), (other, _) = draw(1), draw(1), draw(2)
    assert slots == 4  # attention, its output, and two in the feed-forward half
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.nn.functional.dropout is not None
    with reference_dropout():
        pass
    torch.manual_seed(0)
    assert (torch.nn.functional.dropout(x, 0.5) == 0).any()


def test_evaluation_takes_no_slot():
    with reference_dropout() as mode:
        Tiny().eval().first(torch.ones(3))
    assert mode.slot == 0


def test_an_unknown_kernel_is_named():
    with pytest.raises(ValueError, match=r"there is no kernel 'meshwright\.dropot'") as caught:
        kernel("meshwright.dropot")
    assert "meshwright.dropout" in str(caught.value)


def test_a_distribution_that_ranks_cannot_agree_on_is_refused():
    case = sample("aten.poisson.default", torch.ones(4, 6, dtype=torch.float64))
    node = replace(case.node, kwargs=(("seed", 1),))
    site = replace(case.site, node=node)
    with pytest.raises(
        RuleError, match=r"aten\.poisson\.default draws random numbers that would differ between ranks"
    ):
        localize(site, layouts(site, UNSHARDED), Mesh.of(), {})


DRAWS = {
    ("uniform", (2.0, 6.0)): (4.0, (16 / 12) ** 0.5),
    ("normal", (1.0, 2.0)): (1.0, 2.0),
    ("exponential", (2.0,)): (0.5, 0.5),
    ("geometric", (0.25,)): (4.0, 12**0.5),
    ("log normal", (0.0, 0.5)): (1.1331, 0.6039),
    ("integer", (0.0, 10.0)): (4.5, 8.25**0.5),
}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("kind", "numbers"), DRAWS)
def test_distributions_have_their_mean_and_deviation(kind, numbers, exact):
    rank = Rank(Alone(Mesh.of()), CPU, seed=3, exact=exact)
    count = 100_000
    drawn = kernel("meshwright.random")(rank, kind, numbers, 0, f"[{count}]", dtype=torch.float64, device=CPU)
    mean, deviation = DRAWS[kind, numbers]
    assert abs(drawn.mean() - mean) < 5 * deviation / count**0.5
    assert abs(drawn.std() / deviation - 1) < 0.03
