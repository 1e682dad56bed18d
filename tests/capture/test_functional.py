"""Programs that are not decomposed: each operator taken as it is exported is the same after decomposition."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from torch import nn
from torch.fx import traceback

import meshwright as mw
from meshwright.capture import capture
from meshwright.capture.forward import capture_forward
from meshwright.capture.functional import UNCHANGED
from meshwright.core.graph import Graph, Node, Ref, map_refs
from meshwright.examples import gpt, llama, recommender
from meshwright.ops.aliases import ALIASES
from tests.breadth import first
from tests.ops.prove import CPU, Sample, argument, sample
from tests.ops.sample_calls import f, i
from tests.ops.samples import SAMPLES

F32 = torch.float32
# Operators that have a normal form and no rule.
FORMS: dict[str, tuple[Any, ...]] = {
    "view.default": (f(4, 6), [24]), "_unsafe_view.default": (f(4, 6), [24]), "reshape.default": (f(4, 6), [6, 4]),
    "unsqueeze.default": (f(4, 6), 1), "squeeze.default": (f(4, 1, 6),), "squeeze.dim": (f(4, 1, 6), 1),
    "squeeze.dims": (f(4, 1, 6, 1), [1, 3]), "flatten.using_ints": (f(4, 5, 6), 1),
    "unflatten.int": (f(4, 6), 1, [2, 3]), "view_as.default": (f(4, 6), f(24)), "reshape_as.default": (f(4, 6), f(24)),
    "transpose.int": (f(4, 6), 0, 1), "t.default": (f(4, 6),), "numpy_T.default": (f(4, 6),),
    "select.int": (f(4, 6), 0, 1), "split.Tensor": (f(4, 6), 3), "chunk.default": (f(4, 6), 3),
    "expand_as.default": (f(1, 6), f(4, 6)), "broadcast_to.default": (f(1, 6), [4, 6]),
    "broadcast_tensors.default": ([f(1, 6), f(4, 1)],),
    "contiguous.default": (f(4, 6),), "alias.default": (f(4, 6),), "lift_fresh_copy.default": (f(4, 6),),
    "to.dtype": (f(4, 6), F32), "to.device": (f(4, 6), CPU, F32), "type_as.default": (f(4, 6), f(1).float()),
    "scalar_tensor.default": (2.0,), "full_like.default": (f(4, 6), 2.0), "new_full.default": (f(4), [4, 6], 2.0),
    "ones.default": ([4, 6],), "ones_like.default": (f(4, 6),), "new_ones.default": (f(4), [4, 6]),
    "zeros.default": ([4, 6],), "zeros_like.default": (f(4, 6),), "new_zeros.default": (f(4), [4, 6]),
    "empty.memory_format": ([4, 6],), "empty_like.default": (f(4, 6),), "new_empty.default": (f(4), [4, 6]),
    "empty_strided.default": ([4, 6], [6, 1]), "new_empty_strided.default": (f(4), [4, 6], [6, 1]),
    "empty_permuted.default": ([4, 6], [1, 0]), "dropout.default": (f(4, 6), 0.5, True),
    "normal.float_float": (0.0, 1.0, [4, 6]), "atleast_1d.default": (f(),), "atleast_2d.default": (f(6),),
    "atleast_3d.default": (f(4, 6),), "atleast_1d.Sequence": ([f(), f(6)],), "atleast_2d.Sequence": ([f(), f(6)],),
    "atleast_3d.Sequence": ([f(), f(6)],), "hstack.default": ([f(4, 6), f(4, 5)],),
    "vstack.default": ([f(4, 6), f(6)],), "dstack.default": ([f(4, 6), f(4, 6)],),
    "column_stack.default": ([f(4, 6), f(4)],), "tile.default": (f(4, 6), [2]), "fliplr.default": (f(4, 6),),
    "flipud.default": (f(4, 6),), "rot90.default": (f(4, 6), 1, [0, 1]),
    "take_along_dim.default": (f(4, 6), i(6, 1, 3), 1), "channel_shuffle.default": (f(4, 6, 5), 2),
    "cross.default": (f(4, 3), f(4, 3)), "kron.default": (f(4, 6), f(2)), "diag.default": (f(4, 6),),
    "special_round.default": (f(4, 6),), "trapezoid.dx": (f(4, 6),), "trapz.dx": (f(4, 6),),
    "as_strided.default": (f(4, 6), [2, 3], [6, 1]), "as_strided_scatter.default": (f(4, 6), f(2, 3), [2, 3], [6, 1]),
    "linalg_multi_dot.default": ([f(4, 6), f(6, 5), f(5, 3)],),
}  # fmt: skip
PARTS = 8
CHECK = "aten._assert_tensor_metadata.default"  # has no result; export writes it before a cast


class Calls(nn.Module):
    """Many operators, each of tensors of its own: ``number of the call.number of the tensor`` → tensor."""

    def __init__(self, nodes: list[Node]) -> None:
        super().__init__()
        self.nodes = nodes

    def forward(self, tensors: dict[str, torch.Tensor]) -> list[list[torch.Tensor]]:
        return [
            [x for x in self.call(number, node, tensors) if not any(x is t for t in tensors.values())]
            for number, node in enumerate(self.nodes)
        ]

    def call(self, number: int, node: Node, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        known = {name: tensors[f"{number}.{place}"] for place, name in enumerate(node.uses)}
        space, name, overload = node.op.split(".")
        op = getattr(getattr(getattr(torch.ops, space), name), overload)
        more = {k: argument(v, known) for k, v in node.kwargs if k != "seed"}
        out = op(*(argument(v, known) for v in node.args), **more)
        return list(out) if isinstance(out, tuple | list) else [] if out is None else [out]


def samples(part: int) -> list[Sample]:
    """A sample of every eighth operator that is taken as it is."""
    torch.manual_seed(0)
    ops = sorted(op for op in UNCHANGED if op.startswith("aten.") and op != CHECK)
    return [sample_of(op) for op in ops[part::PARTS]]


def sample_of(op: str) -> Sample:
    """A sample of an operator; that of its first name, under the second."""
    if op in SAMPLES:
        return SAMPLES[op][0]()
    if op.removeprefix("aten.") in FORMS:
        return sample(op, *FORMS[op.removeprefix("aten.")])
    first_name = sample_of(ALIASES[op])
    return replace(first_name, node=replace(first_name.node, op=op))


def captured(cases: list[Sample]) -> Graph:
    tensors = {
        f"{number}.{place}": x.detach() for number, s in enumerate(cases) for place, x in enumerate(s.tensors)
    }
    model = Calls([s.node for s in cases])
    return capture_forward(model, tensors, lambda model, batch: model(batch)).captured.graph


def twice(monkeypatch: pytest.MonkeyPatch, capture: Callable[[], Graph]) -> tuple[Graph, Graph]:
    """What is captured without decomposition, and with it."""

    def refuse(*_: Any) -> NoReturn:
        raise AssertionError("the program was decomposed")

    with monkeypatch.context() as alone:
        alone.setattr(torch.export.ExportedProgram, "run_decompositions", refuse)
        found = capture()
    monkeypatch.setattr("meshwright.capture.trace.is_functional", lambda program: False)
    return found, capture()


@pytest.mark.parametrize("part", first(1, range(PARTS)))
def test_an_operator_stays_what_it_is(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = samples(part)
    found, decomposed = twice(monkeypatch, lambda: captured(cases))
    assert len(found.nodes) > len(cases) // 2
    assert found == decomposed


@pytest.mark.full  # the one with tables is such a model, too
@pytest.mark.parametrize("build", first(1, (llama.build, gpt.build, recommender.build)))
def test_a_model_stays_what_it_is(build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    found, decomposed = twice(monkeypatch, lambda: capture(*build()).graph)
    assert found == decomposed


def test_the_check_before_a_cast_is_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(4, 6)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch.to(F32)).mean()

    batch = torch.zeros(2, 4, dtype=torch.float64)
    found, decomposed = twice(monkeypatch, lambda: capture(model, batch, loss).graph)
    assert found == decomposed


class Blocks(nn.Module):
    """A frozen target beside what is trained, with blocks inside blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            low, high = self.target(x).chunk(2, -1)
            with torch.enable_grad():
                inner = self.online(x)
            both = torch.cat([high, low * inner[:, :2]], -1)
        return (self.online(x) * both + self.target(both)).mean() + low.sum() + inner.mean(), both


def test_blocks_without_gradient_are_inlined(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(3, 4)
    found, decomposed = twice(
        monkeypatch, lambda: capture(Blocks(), x, lambda model, batch: model(batch)[0]).graph
    )
    assert found == decomposed
    assert str(found) == str(decomposed)  # with modules and lines
    assert [n.op for n in found.nodes].count("aten.linear.default") == 4


def test_a_result_of_a_block_may_be_one_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(3, 4)

    def graph() -> Graph:
        return capture(Blocks(), x, lambda model, batch: model(batch)).graph

    found = graph()
    monkeypatch.setattr("meshwright.capture.trace.is_functional", lambda program: False)
    assert found == graph()


@pytest.mark.parametrize("name", first(1, ("Llama", "Gemma2")))
def test_a_model_with_tables_made_without_gradient_stays_what_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
    config = getattr(transformers, f"{name}Config")(**sizes, **heads)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    batch = {k: torch.zeros(2, 16, dtype=torch.int64) for k in ("input_ids", "labels")}
    found, decomposed = twice(
        monkeypatch, lambda: capture(model, batch, lambda model, batch: model(**batch).loss).graph
    )
    assert str(found) == str(decomposed)


def meanings(graph: Graph) -> Counter[str]:
    """What each value is computed from, down to the inputs, whatever the order and the names of operators."""
    known = {entry.name: f"{entry.role} {entry.target}" for entry in graph.inputs}
    found: Counter[str] = Counter()

    def meant(ref: Ref) -> Ref:
        return Ref(known[ref.name])

    for node in graph.nodes:
        args = map_refs((node.args, node.kwargs), meant)
        said = f"{node.op} {args} {node.outputs} {node.needs_grad} {node.module}"
        text = hashlib.sha256(said.encode()).hexdigest()
        found[text] += 1
        known.update({value: f"{text} {n}" for n, value in enumerate(node.values)})
    for label, value in graph.outputs:
        found[f"{label} {known[value]}"] += 1
    return found


class Writes(nn.Module):
    """Writes into fresh tensors, and one that is read before and after, through views, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        before = y.sum(-1, keepdim=True)
        y /= before
        flat = y.view(-1)
        y = torch.matmul(x, self.linear.weight.t())
        y.mul_(2.0)
        y += flat.view(y.shape)
        mask = torch.zeros_like(y)
        mask.scatter_(1, y.argmax(1, keepdim=True), 1.0)
        return (y * mask).sum() + y[:, 0].mean() + flat.sum() + self.parts(x)

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        shifted = x.new_zeros(x.shape)
        shifted[..., 1:] = x[..., :-1].clone()
        before = shifted.sum()
        shifted[..., 0] = 3
        shifted.masked_fill_(shifted == 3, 2)
        keys = x.new_empty(3, 2, 8)
        keys[..., :4].copy_(self.linear(x)[:, None, :4])
        keys[:, :1, 4:].copy_(x.unsqueeze(1).double())
        keys[:, 1, 4:] = shifted
        return before + keys.square().sum()


def test_writes_into_fresh_tensors_make_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3, 4)
    found, decomposed = twice(
        monkeypatch, lambda: capture(Writes(), x, lambda model, batch: model(batch)).graph
    )
    assert meanings(found) == meanings(decomposed)
    assert not any("_." in node.op for node in found.nodes)


@pytest.mark.parametrize(
    "odd", ["view before", "other dtype", "without gradient", "argument", "view written to", "part before"]
)
def test_other_writes_are_decomposed(odd: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        if odd == "view before":
            view = y[:, 0]
            y *= 2.0
            return view.mean()
        if odd == "other dtype":
            return y.mul_(torch.full((), 2.0, dtype=torch.float64).expand(6)).mean()
        if odd == "without gradient":
            with torch.no_grad():
                z = torch.zeros_like(y)
                z += model.weight.sum()
            return (y * z).mean()
        if odd == "argument":
            z = torch.atleast_2d(y)  # y itself
            z *= 2.0
            return y.mean()
        if odd == "part before":
            z = torch.zeros_like(y)
            part = z[:, 0]
            z[:, :2] = y[:, :2]
            return part.sum()
        y[:, 0].mul_(2.0)
        return y.mean()

    model, x = nn.Linear(4, 6), torch.randn(3, 4)
    done: list[bool] = []

    def decompose(program: Any, *args: Any) -> Any:
        done.append(True)
        return run(program, *args)

    run = torch.export.ExportedProgram.run_decompositions
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", decompose)
    capture(model, x, loss)
    assert done


@pytest.mark.full  # test_writes_into_fresh_tensors_make_new_ones does
@pytest.mark.parametrize("name", first(1, ("Mixtral", "GptOss")))
def test_a_model_that_writes_in_place_stays_what_it_is(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, **experts)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForCausalLM")(config).to(torch.bfloat16)
        batch = {k: torch.zeros(2, 16, dtype=torch.int64) for k in ("input_ids", "labels")}
    found, decomposed = twice(
        monkeypatch, lambda: capture(model, batch, lambda model, batch: model(**batch).loss).graph
    )
    assert meanings(found) == meanings(decomposed)


def test_what_another_trace_has_left_is_not_taken_for_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shifted(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + torch.tensor([1.0, 2.0])

    monkeypatch.setitem(traceback.current_meta, "custom", {"user_line": "another.py:1"})
    plan = mw.plan(Shifted(4, 2), torch.randn(2, 4), loss=lambda m, b: m(b).sum(), mesh=2)
    assert plan.ranks.size == 2
