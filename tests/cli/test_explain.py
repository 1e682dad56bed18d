"""`meshwright explain`: from the file, with the model, and with seconds that the whole program's price confirms."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

import meshwright as mw
from meshwright.cli.model import cut
from meshwright.compile import captured_of, lower
from meshwright.cost.cluster import Cluster
from meshwright.errors import PlanError
from meshwright.examples import mlp
from meshwright.ops.strategy import layouts
from meshwright.predict.price import program_price
from meshwright.report.alternatives import Alternative, alternatives
from meshwright.report.explain_node import choices, folded, matching
from meshwright.report.explain_node_view import choice_page


@pytest.fixture(scope="module")
def made():
    model, batch, loss = mlp.build()
    plan = mw.plan(
        model,
        batch,
        loss=loss,
        mesh={"dp": 2, "tp": 2},
        mode="sharding_propagation",
        pins={"up.*": {"n": "tp"}},
    )
    captured = captured_of(model, batch, loss)
    return captured, plan, lower(captured, plan)


@pytest.fixture
def file(made, tmp_path):
    made[1].save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_pattern_means_nodes_modules_and_what_is_inside(made):
    _, plan, _ = made
    assert matching(plan, "up.*") == tuple(n for n, (_, m) in plan.about.items() if m.startswith("up."))
    assert matching(plan, "up") == matching(plan, "up.*")
    assert matching(plan, "%linear_1") == matching(plan, "linear_1") == ("linear_1",)
    with pytest.raises(PlanError, match=r"did you mean .*'down"):
        matching(plan, "dwon.*")


def test_a_file_says_its_techniques(tmp_path, meshwright):
    words = ("--mesh", "dp=2,tp=2", "--with", "offload=optimizer+activations,micro_batches=2")
    for done in (
        meshwright("plan", "zoo:mlp", *words, "-o", tmp_path / "p.json"),
        meshwright("explain", tmp_path / "p.json"),
    ):
        said = next(line for line in done.out.splitlines() if line.startswith("techniques"))
        assert said.split(maxsplit=1)[1].rstrip() == "micro_batches=2, offload=optimizer+activations"


def test_layers_that_are_cut_alike_are_one_line(made):
    _, plan, parts = made
    rows = folded(choices(plan, plan.strategies, parts))
    assert ("up.*", 2) in [(where, count) for where, count, _ in rows]
    assert sum(count for _, count, _ in rows) == len(plan.strategies)


def test_neighbours_say_what_stands_between(made):
    _, plan, parts = made
    (down,) = choices(plan, ["linear_2"], parts)
    assert (down.module, down.operator, down.cut) == ("down.0", "linear", "batch=dp k=tp")
    weight = next(e for e in down.neighbours if e.name == "down.0.weight")
    assert (weight.incoming, weight.has, weight.asks, weight.moves) == (
        True,
        "[24, 96/tp]",
        "[24, 96/tp]",
        ("", ""),
    )
    gives = next(e for e in down.neighbours if not e.incoming)
    assert gives.has.endswith("partial tp") and gives.asks == "[12/dp, 24]"
    assert gives.moves[0].startswith("all_reduce(tp)")


def test_seconds_of_operators_add_up_to_the_price_of_the_step(made):
    _, plan, parts = made
    price = program_price(parts, Cluster.preset("h100", ranks_per_node=4))
    found = choices(plan, plan.strategies, parts, [price])
    computed = sum(c.seconds.forward + c.seconds.backward for c in found if c.seconds)
    assert computed == pytest.approx(price.compute)


@pytest.mark.parametrize("hub", [False, True])
@pytest.mark.parametrize("name", ["linear", "linear_1", "linear_2", "relu", "add"])
def test_an_alternative_costs_what_the_whole_program_says(made, name, hub):
    captured, plan, parts = made
    cluster = Cluster.preset("h100", ranks_per_node=4)
    # As a value's hub is, from which its readers reshard: the split that it has without one.
    hubs = {v: parts.resharded.layouts[v].forward for v in ("relu", "linear_1")} if hub else {}
    plan = replace(plan, hubs=hubs)
    parts = cut(captured, plan, cluster)
    before = program_price(parts, cluster).total
    found = alternatives(captured.graph, parts, name, cluster)
    assert len(found) >= 2
    assert [a.more_seconds for a in found] == sorted(a.more_seconds for a in found)
    node = next(n for n in captured.graph.nodes if n.name == name)
    parameters = {i.name for i in captured.graph.input_of("parameter")}
    for other in found:
        asked = layouts(parts.factors.sites[name], other.strategy).inputs
        follow = {u: replace(a, partial=()) for u, a in zip(node.uses, asked, strict=True) if u in parameters}
        changed = replace(
            plan, strategies={**plan.strategies, name: other.strategy}, inputs={**plan.inputs, **follow}
        )
        after = program_price(cut(captured, changed, cluster), cluster).total
        assert after - before == pytest.approx(other.more_seconds, rel=1e-6, abs=1e-12)


# ---------------------------------------------------------------- the verb


def test_the_file_alone_says_cuts_and_reasons(file, meshwright):
    done = meshwright("explain", file)
    assert done.code == 0
    line = next(x.split() for x in done.out.splitlines() if x.startswith("up.*"))
    assert line == ["up.*", "×2", "linear", "d0=dp", "n=tp", "annotated"]
    page = meshwright("explain", file, "up.*").out
    assert "annotated" in page and "d0=dp n=tp" in page


def test_the_next_best_names_what_counts_examples_as_the_cut_does(made):
    """From the file alone its letter is all that is known."""
    _, plan, parts = made
    name = matching(plan, "down.0")[0]
    noted = replace(plan, nexts={name: "d0=dp n=tp at +1 ms"})
    assert [c.next for c in choices(noted, [name], None)] == ["d0=dp n=tp at +1 ms"]
    assert [c.next for c in choices(noted, [name], parts)] == ["batch=dp n=tp at +1 ms"]


def test_model_and_cluster_say_the_rest(file, meshwright):
    done = meshwright("explain", file, "down.0", "--model", "zoo:mlp", "--cluster", "preset:h100:4")
    assert done.code == 0
    for text in ("all_reduce(tp)", "forward", "other shardings of it alone", "mlp.py:"):
        assert text in done.out
    table = meshwright("explain", file, "--model", "zoo:mlp").out
    assert "parameters:" in table


def test_a_price_below_the_choice_says_what_it_is(made):
    """A sum of prices is no step."""
    _, plan, parts = made
    (down,) = choices(plan, ["linear_2"], parts)
    for more, said in ((-1e-3, True), (0.0, False), (1e-3, False)):
        other = Alternative(plan.strategies["linear_1"], more)
        screen = Console(width=200, file=io.StringIO())
        screen.print(choice_page("down.0", 1, down, plan.mesh, [other], 1.0))
        assert ("cheaper by the sum of prices" in screen.file.getvalue()) == said


def test_it_answers_in_json(file, meshwright):
    done = meshwright("explain", file, "up.*", "--model", "zoo:mlp", "--cluster", "preset:h100:4", "--json")
    rows = json.loads(done.out)["operators"]
    assert sum(row["count"] for row in rows) == 2
    for row in rows:
        assert row["cut"] == "batch=dp n=tp" and row["seconds"]["forward"] > 0 and len(row["otherwise"]) > 2


def test_a_layer_that_the_file_leaves_out_is_explained(tmp_path, meshwright):
    """The file lists two of five equal layers; with the model all have their own names of operators."""
    (tmp_path / "deep.py").write_text(
        "from meshwright.examples import mlp\n\n\ndef build():\n    return mlp.build(depth=5)\n"
    )
    model, file = f"{tmp_path}/deep.py:build", tmp_path / "plan.json"
    assert meshwright("plan", model, "--mesh", "dp=2,tp=2", "-o", file).code == 0
    alone, full = meshwright("explain", file, "up.3"), meshwright("explain", file, "up.3", "--model", model)
    for done in (alone, full):
        assert done.code == 0 and done.out.startswith("up.3   linear") and "×" not in done.out
    assert "the file lists up.1 for up.3" in alone.out and "%linear_3\n" in alone.out
    assert "the file lists" not in full.out and "%linear_7\n" in full.out and "up.3.weight" in full.out
    assert meshwright("explain", file, "%linear_7", "--model", model).code == 0


def test_what_cannot_be_explained_says_why(file, meshwright):
    done = meshwright("explain", file, "upp.*")
    assert done.code == 2 and "did you mean" in done.err
    done = meshwright("explain", file, "--cluster", "preset:h100:4")
    assert done.code == 2 and "--cluster needs --model" in done.err
    done = meshwright("explain", file, "--model", "zoo:recommender")
    assert done.code == 2 and "the plan was made for another model" in done.err
