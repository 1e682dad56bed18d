"""What a preset's device typically reaches, by the kind of software."""

from __future__ import annotations

import pytest

from meshwright.cli.arguments import open_cluster
from meshwright.cost.cluster import Cluster
from meshwright.cost.execution import EXECUTIONS, RATES
from meshwright.cost.machine import arithmetic_rate, seconds
from meshwright.cost.operators import Work
from meshwright.cost.presets import names

ADD = Work("memory", "bf16", 0.0, 0.0, 1e9, 0.0, 1, 0)
PRODUCT = Work("matmul", "bf16", 1e13, 0.0, 1e8, 0.0, 1, 0)


def test_a_preset_without_an_execution_is_its_data_sheet_alone():
    assert not Cluster.preset("h100").measured.rates and not Cluster.preset("h100").measured.corrections


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("name", names())
def test_every_preset_is_slower_than_its_sheet_and_comes_back_from_its_file(name, execution):
    sheet, typical = Cluster.preset(name), Cluster.preset(name, execution=execution)
    again = Cluster.from_yaml(typical.to_yaml())
    assert again == typical
    peak = sheet.device.flops.get("bf16", max(sheet.device.flops.values()))
    taken, _ = seconds(PRODUCT, typical.device, typical.measured)
    assert taken > PRODUCT.flops_forward / peak
    rates = [
        arithmetic_rate("matmul", "bf16", flops, typical.device, typical.measured)
        for flops in (1e9, 1e11, 1e13)
    ]
    assert rates == sorted(rates)


def test_a_compiler_moves_less_through_memory_than_eager_operators_do():
    taken = {
        name: seconds(ADD, (c := Cluster.preset("h100", execution=name)).device, c.measured)[0]
        for name in EXECUTIONS
    }
    assert taken["compiled"] < taken["eager"] and taken["fused"] < taken["eager"]


def test_every_device_with_rates_has_a_preset_and_links_are_slower_than_the_sheets():
    assert set(RATES) <= {Cluster.preset(name).device.name for name in names()}
    mesh = Cluster.preset("h100", nodes=2).mesh
    laws = [
        Cluster.preset("h100", nodes=2, execution=name).prices.law("all_gather", mesh, [mesh.axes[0].name])[1]
        for name in ("", "eager")
    ]
    assert laws[0] < laws[1]


def test_the_command_line_names_an_execution():
    assert open_cluster("preset:h100:2x8:fused") == Cluster.preset("h100", nodes=2, execution="fused")
    with pytest.raises(Exception, match="there is no execution 'lazy'"):
        open_cluster("preset:h100:8:lazy")
