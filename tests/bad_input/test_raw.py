"""What used to end in a traceback of Python's or torch's, or was taken without a word."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.errors import (
    BatchError,
    CaptureError,
    CheckpointError,
    ClusterError,
    LaunchError,
    MeshError,
    MeshwrightError,
    PlanError,
    RunError,
    StrategyError,
)
from meshwright.examples import gpt, mlp
from tests.bad_input.wrong import built, fresh, perceptron

ODD = ("a\0b", "a" * 5000, "\ud800", 3, b"plan.json")


def told(error: type[MeshwrightError], make: Callable[[], Any]) -> MeshwrightError:
    """The error, with a reason and a way out."""
    with pytest.raises(error) as caught:
        make()
    assert caught.value.why and caught.value.hint, caught.value
    assert len(str(caught.value)) < 1000
    return caught.value


def trained() -> mw.TrainStep:
    model, batch, loss = fresh()
    return mw.train_step(model, lambda p: torch.optim.SGD(p, lr=0.1), batch, loss=loss, mesh=1)


@pytest.mark.parametrize("path", ODD, ids=["NUL", "long", "surrogate", "number", "bytes"])
def test_what_no_file_can_be_called_is_refused_wherever_a_path_is_taken(path: Any) -> None:
    plan, cluster, step = perceptron(), mw.Cluster.local(2), trained()
    told(PlanError, lambda: plan.save(path))
    told(PlanError, lambda: mw.Plan.load(path))
    told(ClusterError, lambda: cluster.save(path))
    told(ClusterError, lambda: mw.Cluster.load(path))
    for use in (step.save, step.load, step.resume):
        told(CheckpointError, lambda use=use: use(path))
    model, batch, loss = built()
    told(CaptureError, lambda: mw.plan(model, batch, loss=loss, mesh=1, cache=path))


@pytest.mark.parametrize("folder", ["/proc/none", "/dev/null", "/dev/null/none"])
def test_where_nothing_can_be_written(folder: str) -> None:
    model, batch, loss = built()
    assert "can be written" in told(CaptureError, lambda: mw.plan(model, batch, loss=loss, cache=folder)).what
    assert "cannot be written" in told(PlanError, lambda: perceptron().save(f"{folder}/plan.json")).what
    assert (
        "cannot be written" in told(ClusterError, lambda: mw.Cluster.local(2).save(f"{folder}/c.yaml")).what
    )
    told(CheckpointError, lambda: trained().save(folder))


def test_training_does_not_begin_anew_where_the_path_is_no_folder(tmp_path: Path) -> None:
    step = trained()
    assert told(CheckpointError, lambda: step.resume("/dev/null")).why == "it is a file"
    assert step.resume(tmp_path / "none") is None


@pytest.mark.parametrize("pins", [{0: {"n": "tp"}}, {"up*": {None: "tp"}}, {None: 3}, {("up",): {"n": "tp"}}])
def test_pins_are_by_name(pins: Any) -> None:
    assert "where a name is expected" in told(StrategyError, lambda: perceptron(pins)).what
    model, batch, loss = built()
    asked = {"mesh": [{"dp": 2}, {"dp": 2}], "mode": "semi_auto", "pins": pins}
    told(StrategyError, lambda: mw.plan(model, batch, loss=loss, **asked))
    assert (
        "no operator of 'up*' has a factor 0"
        in told(StrategyError, lambda: perceptron({"up*": {0: "tp"}})).what
    )


def test_batches_that_are_sparse_or_hold_themselves() -> None:
    model, loss = torch.nn.Linear(8, 4), lambda m, batch: m(batch[0]).sum()
    endless: list[Any] = [torch.ones(2, 8)]
    endless.append({"again": endless})
    sparse = [torch.eye(8).to_sparse()]
    step = mw.train_step(model, lambda p: torch.optim.SGD(p, lr=0.1), [torch.eye(8)], loss=loss, mesh=1)
    for batch, what in ((endless, "without end"), (sparse, "sparse_coo")):
        assert what in told(BatchError, lambda batch=batch: mw.plan(model, batch, loss=loss, mesh=2)).what
        assert what in told(BatchError, lambda batch=batch: step(batch)).what


def test_data_that_holds_itself_is_not_saved(tmp_path: Path) -> None:
    step, endless = trained(), dict[str, Any]()
    endless["again"] = [endless]
    assert "nested more than" in told(CheckpointError, lambda: step.save(tmp_path, data=endless)).what
    step.save(tmp_path, data={"fine": [[[1]]]})
    assert step.load(tmp_path).data == {"fine": [[[1]]]}


JOBS = {
    "no target": {"target": None},
    "an empty target": {"target": ""},
    "a target with a NUL": {"target": "a\0b.py"},
    "a target that is too long": {"target": "a" * 5000},
    "a text for words": {"args": "abc"},
    "a number among words": {"args": ("--epochs", 3)},
    "a NUL among words": {"args": ("a\0b",)},
    "times in words": {"grace_seconds": "2"},
    "a number for a folder": {"log_dir": 3},
}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_cannot_be_started(name: str) -> None:
    told(LaunchError, lambda: mw.launch(mw.Job(**{"nproc": 1, "target": __file__, **JOBS[name]})))


@pytest.mark.parametrize("mesh", [{"dp": 10**9}, 10**9, {"dp": 2**11, "tp": 2**10}, {"dp": (1 << 61) - 1}])
def test_a_mesh_beyond_any_cluster_is_refused_before_it_is_counted(mesh: Any) -> None:
    model, batch, loss = built()
    assert (
        "the limit is 1,048,576" in told(MeshError, lambda: mw.plan(model, batch, loss=loss, mesh=mesh)).why
    )
    told(MeshError, lambda: mw.train_step(model, torch.optim.SGD, batch, loss=loss, mesh=mesh))
    assert mw.Mesh.of(dp=2**20).size == 2**20
    told(PlanError, lambda: mw.plan(model, batch, loss=loss, mesh=2, micro_batches=10**9))


NAMES = {
    "auto_parallel": 'mode="auto"',
    "hybrid_parallel": "mw.manual_step",
    "expert_parallel": "experts",
    "context_parallel": "mw.reshard",
    "seqpipe": "pipeline=2",
    "full_batch": "mw.shard_loader",
    "enable_alltoall": "leave it out",
    "parameter_server": "mw.parameter_server(",
}


@pytest.mark.parametrize("name", NAMES)
def test_what_other_systems_have_is_named_as_it_is_called_here(name: str) -> None:
    model, batch, loss = built()
    for asked in ({"mode": name}, {name: True}, {"schedule": name, "pipeline": 2, "micro_batches": 2}):
        hint = told(PlanError, lambda asked=asked: mw.plan(model, batch, loss=loss, mesh=2, **asked)).hint
        assert NAMES[name] in hint
        page = hint.rpartition("(")[2].rstrip(")")
        assert (Path(__file__).parents[2] / page).is_file()


def test_several_threads_plan_at_once() -> None:
    def made(number: int) -> str:
        model, batch, loss = (
            gpt.build(gpt.GPTConfig(48, 24, 1, 4, 8, tied=number > 1))
            if number % 2
            else mlp.build(depth=1 + number)
        )
        return mw.plan(
            model, batch, loss=loss, mesh={"dp": 2, "tp": 2}, mode="sharding_propagation"
        ).to_json()

    found: dict[int, str] = {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: made(n)})) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: made(n) for n in range(4)}


@pytest.mark.parametrize("sizes", ["dp", [2, 4], 8], ids=str)
def test_sizes_of_a_mesh_are_named(sizes: Any) -> None:
    told(MeshError, lambda: mw.Mesh.of(sizes))


@pytest.mark.parametrize("order", [3, [0, "1"], [0, True], [0.0, 1.0]], ids=str)
def test_an_order_lists_ranks(order: Any) -> None:
    told(MeshError, lambda: mw.Mesh.of({"dp": 2}, order=order))


def test_a_layout_names_axes() -> None:
    told(StrategyError, lambda: mw.Layout((2, 2), ("a", "b"))(3))  # type: ignore[arg-type]


def test_a_search_is_told_to_functions_and_within_a_space() -> None:
    model, batch, loss = built()
    for wrong in ({"space": 3}, {"progress": 3}):
        told(
            PlanError, lambda wrong=wrong: mw.plan(model, batch, loss=loss, mesh=2, mode="recursive", **wrong)
        )


@pytest.mark.parametrize("path", ["a\0b", "/dev/null/m.jsonl", 3], ids=["NUL", "below a file", "number"])
def test_metrics_go_where_a_file_can_be(path: Any) -> None:
    step = trained()
    told(RunError, lambda: mw.Metrics(step, path))


def test_a_job_has_no_more_processes_than_a_machine_can_start() -> None:
    told(LaunchError, lambda: mw.launch(mw.Job(10**9, __file__)))
