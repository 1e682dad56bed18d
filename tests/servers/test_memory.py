"""Tests of the memory of a server beside its tables."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from meshwright.servers.shards import Parameter, Start
from meshwright.servers.starts import AT_ONCE, fill
from meshwright.servers.store import Stored

# prints the most memory that filling a table took, over the size of the table
FILL = """
import functools, pathlib
import torch
from meshwright.servers.shards import Parameter, Start
from meshwright.servers.starts import fill
from meshwright.servers.store import Stored

def most():
    line = pathlib.Path("/proc/self/status").read_text().partition("VmHWM:")[2]
    return int(line.split()[0]) << 10

table = Parameter("t", (500_000, 64), "float32", "SparseAdam", {"lr": 0.1}, True, True, Start("normal", 0.0, 1.0, 1))
Stored(table)  # loads what the first optimizer needs
before, stored = most(), Stored(table)
stored.start(range(table.blocks), functools.partial(fill, table))
print((most() - before) / stored.tensor.nbytes)
"""


def test_a_table_is_filled_without_a_second_one_in_memory():
    run = subprocess.run([sys.executable, "-c", FILL], capture_output=True, text=True, check=True)
    assert float(run.stdout) < 1.3, (
        "of the table; values and words of all blocks together take more than twice"
    )


@pytest.mark.parametrize("start", [Start("uniform", -1.0, 1.0, 3), Start("normal", 0.0, 2.0, 3)], ids=str)
def test_rows_that_are_drawn_in_several_goes_are_those_that_are_drawn_alone(start):
    table = Parameter("t", (9000, 7), "float32", "SGD", {"lr": 0.1}, True, True, start)
    assert AT_ONCE < 9000 * 16, "one go would be enough"
    every = fill(table, range(9000))
    for row in (0, 1, 8191, 8192, 8999):
        assert torch.equal(every[row], fill(table, range(row, row + 1))[0]), row


@pytest.mark.parametrize("optimizer", ["SGD", "Adagrad", "SparseAdam"])
def test_a_table_that_is_filled_is_the_one_whose_blocks_are_put(optimizer):
    table = Parameter(
        "t", (70, 3), "float32", optimizer, {"lr": 0.1}, True, True, Start("normal", 0.0, 1.0, 1)
    )
    blocks = list(range(0, table.blocks, 2))
    filled, put = Stored(table), Stored(table)
    filled.start(blocks, lambda rows: fill(table, rows))
    put.put({b: {"values": fill(table, table.rows_of(b))} for b in blocks})
    ids = torch.tensor([i for b in blocks for i in table.rows_of(b)][::3])
    for stored in (filled, put):
        stored.update(torch.ones(len(ids), 3), ids)
    assert filled.blocks == put.blocks
    assert filled.tensors().keys() == put.tensors().keys()
    for name, tensor in put.tensors().items():
        assert torch.equal(filled.tensors()[name], tensor), name
