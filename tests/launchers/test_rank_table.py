"""Rank tables: read, written, used in the place of options, and refused where ranks would be wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshwright.errors import LaunchError
from meshwright.launch.from_table import with_table
from meshwright.launch.nodes import placed
from meshwright.launchers import launched
from meshwright.launchers.rank_table import RankTable, read

NOTHING: dict[str, str | None] = dict.fromkeys(("nproc", "nnodes", "world", "index", "master_at", "id"))


def table(**change: Any) -> dict[str, Any]:
    """Two servers in two clusters, with fields that say nothing about ranks."""
    servers = [
        {
            "server_id": f"server_{n}",
            "server_ip": f"127.0.0.{n + 1}",
            "host_nic_ip": "reserve",
            "device": [
                {"device_id": str(d), "device_ip": "192.0.2.6", "dpu_ip": "192.0.2.7", "numa_id": "", "rank_id": str(r)}
                for d, r in ranks
            ],
        }
        for n, ranks in enumerate([[(4, 0), (5, 1)], [(1, 2)]])
    ]  # fmt: skip
    clusters = [
        {"cluster_id": f"c{n}", "network_type": "ROCE", "az_id": "a", "region_id": "r",
         "server_list": [{"server_id": f"server_{n}"}]}
        for n in range(2)
    ]  # fmt: skip
    plain = {"version": "1.0", "server_count": "2", "server_list": servers, "cluster_list": clusters}
    return {**plain, "status": "completed", **change}


def written(folder: Path, content: dict[str, Any]) -> Path:
    path = folder / "table.json"
    path.write_text(json.dumps(content))
    return path


def test_a_table_is_what_options_would_say(tmp_path: Path) -> None:
    path = written(tmp_path, table())
    nodes, counts = placed({}, **with_table(path, {}, {**NOTHING, "index": "1"}))
    assert nodes is not None
    assert (counts, nodes.world, nodes.index, nodes.master) == ((2, 1), 3, 1, "127.0.0.1:8118")
    found = read(path, "--rank-table")
    found.save(path)
    assert read(path, "--rank-table") == found
    alone = RankTable.of({"127.0.0.1": (1, 0)})
    alone.save(path)
    assert read(path, "--rank-table") == alone
    assert with_table(None, {"RANK_TABLE_FILE": str(path)}, NOTHING) == {**NOTHING, "nproc": "2"}


def test_devices_are_named_in_the_order_of_ranks_and_unknown_ones_refused(tmp_path: Path) -> None:
    path, environment = tmp_path / "table.json", dict[str, str]()
    RankTable.of({"127.0.0.1": (1, 0)}).save(path)
    for number in range(2):
        (tmp_path / f"nvidia{number}").touch()
    with_table(path, environment, NOTHING, tmp_path)
    assert environment == {"CUDA_VISIBLE_DEVICES": "1,0"}
    with pytest.raises(LaunchError, match="CUDA_VISIBLE_DEVICES is 0"):
        with_table(path, {"CUDA_VISIBLE_DEVICES": "0"}, NOTHING, tmp_path)
    RankTable.of({"127.0.0.1": (1, 2)}).save(path)
    with pytest.raises(LaunchError, match="no device 2"):
        with_table(path, {}, NOTHING, tmp_path)
    with pytest.raises(LaunchError, match="--nproc together with --rank-table"):
        with_table(path, {}, {**NOTHING, "nproc": "2"}, tmp_path)


def devices(*ranks: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"server_id": "a", "device": [{"device_id": d, "rank_id": r} for d, r in ranks]}]


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (table(version="2.0"), "version is '2.0'"),
        (table(server_count="3"), "server_count is 3, server_list has 2"),
        (table(server_count="1", server_list=devices(("0", "0"), ("1", "2"))), "rank_id 1 is missing"),
        (table(server_count="1", server_list=devices(("0", "0"), ("1", "0"))), "rank_id 0 occurs twice"),
        (table(server_count="1", server_list=devices(("0", "0"), ("0", "1"))), "device_id 0 of server a occurs"),
        (table(server_count="1", server_list=devices(("x", "0"))), "device_id 'x' of server a is no number"),
        (table(server_count="1", server_list=devices()), "server a has no device"),
        (table(server_count="1", server_list=devices(("0", "0"))), "in one of server_list and cluster_list"),
        (table(server_list=7), "server_list"),
    ],
)  # fmt: skip
def test_tables_with_wrong_ranks_are_refused(content: dict[str, Any], what: str, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=what) as caught:
        read(written(tmp_path, content), "RANK_TABLE_FILE")
    assert "RANK_TABLE_FILE" in str(caught.value)


def test_ranks_that_change_servers_are_refused(tmp_path: Path) -> None:
    content = table()
    first, second = content["server_list"]
    first["device"][1]["rank_id"], second["device"][0]["rank_id"] = "2", "1"
    with pytest.raises(LaunchError, match="ranks of server server_0 do not follow one another"):
        read(written(tmp_path, content), "--rank-table")


def test_a_rank_that_was_started_by_hand(tmp_path: Path) -> None:
    env = {"RANK_TABLE_FILE": str(written(tmp_path, table())), "RANK_ID": "1", "DEVICE_ID": "5"}
    found = launched(env)
    assert (found.rank, found.world, found.local_rank, found.local_world) == (1, 3, 5, 2)
    assert found.address == "127.0.0.1" and 20000 <= found.port < 30000
    for change, what in (
        ({"RANK_ID": ""}, "RANK_TABLE_FILE is set, RANK_ID is not"),
        ({"RANK_ID": "3"}, "RANK_ID is 3"),
        ({"DEVICE_ID": "0"}, "DEVICE_ID is 0"),
        ({"RANK_SIZE": "8"}, "RANK_SIZE is 8"),
    ):
        with pytest.raises(LaunchError, match=what):
            launched({**env, **change})


@pytest.mark.procs
def test_two_ranks_started_by_hand_meet(tmp_path: Path) -> None:
    RankTable.of({"127.0.0.1": range(2)}).save(tmp_path / "table.json")
    (tmp_path / "script.py").write_text(SCRIPT)
    folder = tmp_path / ("long" * 25)  # more than the address of a socket may have
    folder.mkdir()
    known = {**os.environ, "RANK_TABLE_FILE": "table.json", "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "script.py"],
            cwd=tmp_path,
            env={**known, "RANK_ID": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (1, 0)
    ]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["1 3.0\n", "0 3.0\n"]


SCRIPT = """
import torch
import meshwright as mw

world = mw.world()
print(world.rank, world.all_reduce(torch.tensor([2.0**world.rank]), tuple(world.mesh.sizes)).item())
mw.shutdown()
"""
