"""Pins, modes, meshes and models that cannot be planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import CaptureError, MeshError, PlanError, StrategyError
from tests.bad_input.wrong import Case, check_told, net, perceptron

HERE = Path(__file__).name


layerdrop = 0.1

CASES = {
    # ---- pins
    "a module that is not there": Case(
        lambda: perceptron({"upp.*": {"n": "tp"}}), StrategyError,
        "no module of the model matches 'upp.*'", "4 modules", "did you mean 'up.0'",
    ),
    "a factor that is not there": Case(
        lambda: perceptron({"up.*": {"z": "tp"}}), StrategyError,
        "no operator of 'up.*' has a factor 'z'", "aten.linear.default has d0=12, k=24, n=96", "known: batch, d0, k, n",
        "mlp.py",
    ),
    "an axis that is not there": Case(
        lambda: perceptron({"up.*": {"n": "tpp"}}), MeshError,
        "the mesh has no axis 'tpp'", "dp=2 × tp=2", "did you mean 'tp'",
    ),
    "an axis for two factors": Case(
        lambda: perceptron({"up.*": {"n": "tp", "k": "tp"}}), StrategyError,
        "axis 'tp' is used twice in aten.linear.default, for n and for k", "one factor", "another axis", "in up.0",
    ),
    "an axis twice for a factor": Case(
        lambda: perceptron({"up.*": {"n": ("tp", "tp")}}), StrategyError,
        "uses an axis twice for n", "tp, tp", "each axis once", "in up.0",
    ),
    "more ranks than elements": Case(
        lambda: perceptron({"leave": {"n": "tp"}}, {"tp": 16}), StrategyError,
        "cannot split n of aten.linear.default over tp", "n is 12 and would need 16 blocks", "at most 12", "in leave",
    ),
    "a number for an axis": Case(
        lambda: perceptron({"up.*": {"n": 2}}), StrategyError,
        "splits n over 2", "given by name", '{"n": ("dp", "tp")}',
    ),
    "an axis for a module": Case(
        lambda: perceptron({"up.*": "tp"}), StrategyError,
        "the pin of 'up.*' is 'tp'", "which factor", '{"n": "tp"}',
    ),
    "pins in a list": Case(
        lambda: perceptron([("up.*", "tp")]), StrategyError, "is a list", "pattern", "pins={",
    ),
    "pins in data parallel": Case(
        lambda: perceptron({"up.*": {"n": "tp"}}, mode="data_parallel"), PlanError,
        'mode="data_parallel" takes no pins', "all 4 ranks", "sharding_propagation",
    ),
    # ---- modes, meshes, models
    "no such mode": Case(
        lambda: perceptron(mode="data_paralel"), PlanError,
        "no mode 'data_paralel'", "semi_auto", "did you mean 'data_parallel'?",
    ),
    "no mode": Case(lambda: perceptron(mode=""), PlanError, "no mode ''", "semi_auto", "known: auto"),
    "a search without a cluster": Case(
        lambda: perceptron(mode="dynamic_programming"), PlanError,
        "mode='dynamic_programming' needs a cluster", "seconds and bytes", "cluster=mw.Cluster.local(4)",
    ),
    "manual": Case(
        lambda: perceptron(mode="manual"), PlanError, "has no plan", "its own collectives", "mw.manual_step",
    ),
    "alone on two": Case(
        lambda: perceptron(mesh=2, mode="stand_alone"), PlanError,
        "one rank, the mesh has 2", "ranks=2", 'mode="data_parallel"',
    ),
    "an axis without ranks": Case(
        lambda: perceptron(mesh={"dp": 0}), MeshError, "axis 'dp' has size 0", "at least 1", "the number of ranks",
    ),
    "a fraction of ranks": Case(
        lambda: perceptron(mesh={"dp": 2.5}), MeshError, "axis 'dp' has size 2.5", "whole number", "number of ranks",
    ),
    "a text for a mesh": Case(
        lambda: perceptron(mesh="4"), MeshError, "mesh='4' is not a mesh", "a str", 'mesh={"dp": 2, "tp": 2}',
    ),
    "a yes for a mesh": Case(
        lambda: perceptron(mesh=True), MeshError, "mesh=True is not a mesh", "a bool", "mesh=4",
    ),
    "a name that a layout cannot hold": Case(
        lambda: perceptron(mesh={"a.b": 2}), MeshError, "'a.b' cannot name an axis", "32/dp.tp", "letters, digits",
    ),
    "an order that misses a rank": Case(
        lambda: mw.Mesh.of({"dp": 2}, order=(0, 0)), MeshError, "each rank once", "[0, 0]", "permutation of 0 … 1",
    ),
    "a batch smaller than the ranks": Case(
        lambda: perceptron(mesh=16, mode="data_parallel"), StrategyError,
        "a batch of 12 cannot be split over 16 ranks", "x is f32[12, 16] and ranks has 16 ranks", "at most 12 ranks",
    ),
    "a batch without tensors": Case(
        lambda: mw.plan(nn.Linear(8, 8), {}, loss=lambda m, b: m(torch.ones(8, 8)).mean(), mesh=2), StrategyError,
        "no dim of the batch is known to count examples", "no tensors", "first dim",
    ),
    "a function for a model": Case(
        lambda: mw.plan(torch.relu, torch.ones(2), mesh=2), CaptureError,
        "not a torch.nn.Module", "parameters", "loss=lambda model, batch",
    ),
    "a loss that is no number": Case(
        lambda: mw.plan(nn.Linear(8, 8), torch.ones(8, 8), mesh=2), CaptureError,
        "the loss is not a scalar", "shape [8, 8]", "loss=lambda model, batch: ",
    ),
    "a branch on a value": Case(
        lambda: net(lambda m, x: x * 2 if x.sum() > 0 else x, mesh=2), CaptureError,
        "decides by the values of a tensor", "data-dependent", "data parallel: mw.manual_step",
        "x * 2 if x.sum() > 0 else x",
    ),
    "a layer that is skipped at random": Case(
        lambda: net(lambda m, x: x if torch.rand([]) < layerdrop else x * 2, mesh=2), CaptureError,
        "decides by the values of a tensor", "data-dependent", "layerdrop=0 in its configuration",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_told_with_the_reason_the_place_and_a_way_out(name: str) -> None:
    check_told(CASES[name])
