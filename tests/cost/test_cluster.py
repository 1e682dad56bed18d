"""Clusters: files that come back as they were, refusals that say what and where, presets against their data sheets."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.core.mesh import Mesh
from meshwright.cost import local_machine as local
from meshwright.cost import presets
from meshwright.cost.cluster import Cluster, Device, Level, Measured
from meshwright.cost.cluster_reader import as_number
from meshwright.cost.cluster_text import number
from meshwright.errors import ClusterError

PLAIN = """\
meshwright cluster: 1
name: two by four
device:
  name: a device
  flops: {f32: 20e12, bf16: 300e12}
  memory_bytes: 40e9
  memory_bytes_per_s: 1.5e12
  launch_seconds: 5e-6
levels:
  - {name: node, size: 2, bytes_per_s: 25e9, latency_seconds: 4e-6}
  - {name: gpu, size: 4, bytes_per_s: 300e9, latency_seconds: 2e-6}
host: {memory_bytes: 1_000_000_000, bytes_per_s: 32e9}
measured:
  rates:
    matmul f32: [[1e6, 1e12], [1e9, 15e12]]
    memory: [[1e6, 1e12]]
  collectives:
    gpu:
      all_reduce: {latency_seconds: 3e-6, bytes_per_s: 230e9}
  slowdown: {compute: 1.1, collective: 1.4}
  corrections: {matmul: 1.05, meeting: 3.0, waited: 2.0, hidden: 0.5}
  void: [memory]
  waited: {gpu: {"all_reduce": {latency_seconds: 10e-6, bytes_per_s: 115e9}}}
  post_seconds: 40e-6
"""


def test_what_was_measured_of_an_accelerator_comes_back() -> None:
    more = PLAIN.replace("  launch_seconds: 5e-6\n", "  launch_seconds: 5e-6\n  issue_seconds: 11e-6\n")
    cluster = Cluster.from_yaml(more + "  operators: {layer_norm bf16: [1.1, 4.5]}\n")
    assert cluster.device.issue_seconds == 11e-6
    assert cluster.measured.operators == {"layer_norm bf16": (1.1, 4.5)}
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster


def test_a_file_says_what_it_says() -> None:
    cluster = Cluster.from_yaml(PLAIN)
    assert cluster == Cluster(
        "two by four",
        Device("a device", {"f32": 20e12, "bf16": 300e12}, 40_000_000_000, 1.5e12, 5e-6),
        (Level("node", 2, 25e9, 4e-6), Level("gpu", 4, 300e9, 2e-6)),
        1_000_000_000,
        32e9,
        Measured(
            {"matmul f32": ((1e6, 1e12), (1e9, 15e12)), "memory": ((1e6, 1e12),)},
            {"gpu": {"all_reduce": (3e-6, 230e9)}},
            {"compute": 1.1, "collective": 1.4},
            {"matmul": 1.05, "meeting": 3.0, "waited": 2.0, "hidden": 0.5},
            ("memory",),
            {"gpu": {"all_reduce": (10e-6, 115e9)}},
            40e-6,
        ),
    )
    assert cluster.ranks == 8
    assert [(a.name, a.size, a.link) for a in cluster.mesh.axes] == [
        ("node", 2, "node"), ("gpu0", 2, "gpu"), ("gpu1", 2, "gpu"),
    ]  # fmt: skip
    # A ring of 4 sends 3 messages twice over: 6 · 3 µs, and 2 · 3/4 of the bytes; not measured: the level's own link.
    # What is waited for has rates and a factor of its own, what is hidden another factor.
    inner = ["gpu0", "gpu1"]
    hidden, waited = cluster.hidden_prices, cluster.prices
    assert hidden.seconds("all_reduce", cluster.mesh, inner, 230e6) == pytest.approx((18e-6 + 1e-3) / 2)
    assert hidden.seconds("all_gather", cluster.mesh, inner, 300e6) == pytest.approx((6e-6 + 1e-3) / 2)
    assert waited.seconds("all_reduce", cluster.mesh, inner, 230e6) == pytest.approx(60e-6 * 3 + 2e-3 * 2)
    assert waited.seconds("all_gather", cluster.mesh, inner, 300e6) == pytest.approx(6e-6 * 3 + 1e-3 * 2)


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    cluster = Cluster.from_yaml(PLAIN)
    cluster.save(tmp_path / "c.yaml", note="measured on a Monday\nwith: care")
    text = (tmp_path / "c.yaml").read_text()
    assert text.startswith("# measured on a Monday\n# with: care\nmeshwright cluster: 1\n")
    assert "    bf16: 300e12\n" in text and "# peak FLOP/s by dtype, dense" in text
    assert Cluster.load(tmp_path / "c.yaml") == cluster
    assert Cluster.load(tmp_path / "c.yaml").to_yaml() == cluster.to_yaml()


NAMES = st.text(min_size=1, max_size=20).filter(lambda s: s.strip() and s.isprintable())
RATES = st.floats(1e3, 1e16)
SECONDS = st.floats(1e-9, 1.0)


@given(
    NAMES,
    st.floats(1e6, 1e18),
    st.integers(1 << 20, 10**15),
    st.lists(st.tuples(st.integers(1, 64), RATES, SECONDS), min_size=1, max_size=3),
    st.dictionaries(st.floats(1.0, 1e20), RATES, min_size=1, max_size=5),
)
def test_every_cluster_comes_back(name, flops, memory, levels, points) -> None:
    cluster = Cluster(
        name,
        Device(name, {"f32": flops}, memory, flops / 1e3, 1e-6),
        tuple(Level(f"level{i}", size, rate, latency) for i, (size, rate, latency) in enumerate(levels)),
        measured=Measured({"matmul f32": tuple(sorted(points.items()))}),
    )
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster


@given(st.floats(1e-9, 1e21) | st.integers(0, 10**15))
def test_numbers_come_back_to_the_last_bit(value: float) -> None:
    assert as_number(number(value)) == value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.35e12, "3.35e12"),
        (989.5e12, "989.5e12"),
        (0.000361, "361e-6"),
        (40, "40"),
        (1.05, "1.05"),
        (80e9, "80e9"),
    ],
)
def test_numbers_read_as_engineers_write_them(value: float, text: str) -> None:
    assert number(value) == text


# What is put in the place of what, and what the error says about it.
REFUSALS = [
    ("  memory_bytes: 40e9\n", "", "device lacks 'memory_bytes'", ":3"),
    ("  memory_bytes: 40e9\n", "  memory_byte: 40e9\n", "did you mean 'memory_bytes'", ":6"),
    ("bf16: 300e12", "bfl6: 300e12", "did you mean 'bf16'", ":5"),
    ("host:", "hots:", "did you mean 'host'", ":12"),
    ("all_reduce:", "allreduce:", "did you mean 'all_reduce'", ":19"),
    ("    gpu:\n", "    gpus:\n", "did you mean 'gpu'", ":18"),
    ("matmul f32:", "matmull f32:", "did you mean 'matmul f32'", ":15"),
    ("slowdown: {compute", "slowdown: {computing", "did you mean 'compute'", ":20"),
    ("memory_bytes: 40e9", "memory_bytes: 40 GB", "device.memory_bytes is '40 GB', not a number", ":6"),
    ("memory_bytes: 40e9", "memory_bytes: [40e9]", "a list of 1, not a number", ":6"),
    ("memory_bytes: 40e9", "memory_bytes: true", "True, not a number", ":6"),
    ("memory_bytes: 40e9", "memory_bytes: .nan", "nan, not a number", ":6"),
    ("memory_bytes: 40e9", "memory_bytes:", "empty, not a number", ":6"),
    ("memory_bytes: 40e9", "memory_bytes: 3", "device.memory_bytes is 3 bytes", ":6"),
    ("memory_bytes: 40e9", "memory_bytes: -40e9", "device.memory_bytes is -4e+10 bytes", ":6"),
    ("memory_bytes: 40e9", "memory_bytes: 10000000.5", "a whole number", ":6"),
    ("memory_bytes_per_s: 1.5e12", "memory_bytes_per_s: 0", "device.memory_bytes_per_s is 0 bytes/s", ":7"),
    ("f32: 20e12", "f32: 1e30", "device.flops.f32 is 1e+30 FLOP/s", ":5"),
    ("flops: {f32: 20e12, bf16: 300e12}", "flops: {}", "device.flops is empty", ":5"),
    ("flops: {f32: 20e12, bf16: 300e12}", "flops: 20e12", "not a mapping", ":5"),
    ("latency_seconds: 4e-6", "latency_seconds: 3600", "levels[0].latency_seconds is 3,600 seconds", ":10"),
    ("latency_seconds: 4e-6", "latency_seconds: -1", "levels[0].latency_seconds is -1 seconds", ":10"),
    ("bytes_per_s: 300e9", "bytes_per_s: 1e400", "levels[1].bytes_per_s is '1e400', not a number", ":11"),
    ("size: 4", "size: 0", "levels[1].size is 0 units", ":11"),
    ("size: 4", "size: 2.5", "a whole number", ":11"),
    ("size: 4", "size: 1_000_000", "has 2,000,000 ranks", ":9"),
    ("name: gpu", "name: node", "the level 'node' occurs twice", ":11"),
    ("name: gpu", "name: my gpu", "'my gpu' cannot name a level", ":11"),
    ("name: gpu", "name: 7", "levels[1].name is 7, not a name", ":11"),
    ("[[1e6, 1e12], [1e9, 15e12]]", "[[1e9, 1e12], [1e6, 15e12]]", "does not ascend", ":15"),
    ("[[1e6, 1e12], [1e9, 15e12]]", "[1e9, 1e12]", "is not a curve", ":15"),
    ("[[1e6, 1e12], [1e9, 15e12]]", "[[1e6, -1e12]]", "measured.rates.matmul f32[0][1] is -1e+12", ":15"),
    ("void: [memory]", "void: memory", "measured.void is 'memory', not a list of names", ":22"),
    ("name: two by four", "growth: star", "'star'", ":2"),
    ("meshwright cluster: 1", "meshwright cluster: 2", "has version 2", ":1"),
    ("meshwright cluster: 1", "cluster: 1", "is not a cluster file", "c.yaml"),
    ("name: a device\n", "name: a device\n  name: another\n", "device.name is there twice", ":5"),
    ("flops: {f32", "flops: {{f32", "is not YAML, or it is truncated", ":"),
    ("name: a device", "name: 'a device", "is not YAML, or it is truncated", ":"),
    ("name: a device", "name: !!python/object/apply:os.system [ls]", "is not YAML", ":4"),
    ("    gpu:\n", "  \tgpu:\n", "is not YAML, or it is truncated", ":18"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "says", "where"), REFUSALS)
def test_a_wrong_entry_is_named_with_its_line(old: str, new: str, says: str, where: str) -> None:
    assert PLAIN.count(old) == 1
    with pytest.raises(ClusterError) as error:
        Cluster.from_yaml(PLAIN.replace(old, new), "c.yaml")
    assert says in str(error.value)
    assert where in error.value.where and error.value.where.startswith("c.yaml")
    assert error.value.why or error.value.hint


@pytest.mark.parametrize(
    ("new", "hint"),
    [
        ("name: '1', size: 4", "without a leading digit"),
        *((f"name: gpu, size: {size}", "size: 1 or more") for size in ("0", "-4")),
        ("name: gpu, size: 2.5", "size: 2 or 3"),
        *((f"name: gpu, size: {size}", "from 1 to 1,048,576") for size in ("true", ".inf", ".nan")),
        ("name: gpu, size: 2_000_000", "size: 1,048,576 or less"),
    ],
)
def test_a_wrong_level_is_told_what_it_may_be(new: str, hint: str) -> None:
    with pytest.raises(ClusterError) as error:
        Cluster.from_yaml(PLAIN.replace("name: gpu, size: 4", new), "c.yaml")
    assert hint in error.value.hint


@pytest.mark.parametrize("levels", ["levels: []", "levels:", "levels: 3", "levels: {}"])
def test_levels_are_a_list_of_levels(levels: str) -> None:
    head, rest = PLAIN.split("levels:\n")
    text = head + levels + "\n" + rest[rest.index("host:") :].replace("    gpu:", "    node:")
    with pytest.raises(ClusterError, match="at least one level"):
        Cluster.from_yaml(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "42",
        "- a\n- b",
        "[" * 1500,
        "a: &a [*a]",
        "\x00",
        "meshwright plan: 1",
        "? [1, 2]\n: 3",
        "a: 2026-13-45",
    ],
)
def test_a_text_that_is_no_cluster_is_refused(text: str) -> None:
    with pytest.raises(ClusterError):
        Cluster.from_yaml(text)


def test_aliases_that_unfold_without_end_stay_small() -> None:
    rows = ["a0: &a0 [1, 1]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    with pytest.raises(ClusterError):
        Cluster.from_yaml("meshwright cluster: 1\ndevice: 1\nlevels: 1\n" + "\n".join(rows))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text(PLAIN)
    with pytest.raises(ClusterError, match=r"did you mean '.*cluster.yaml'"):
        Cluster.load(tmp_path / "clutser.yaml")
    with pytest.raises(ClusterError, match="cannot be read"):
        Cluster.load(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="not UTF-8 text"):
        Cluster.load(tmp_path / "binary.yaml")
    (tmp_path / "huge.yaml").write_bytes(b"#" * (5 << 20))
    with pytest.raises(ClusterError, match="is not a cluster file"):
        Cluster.load(tmp_path / "huge.yaml")


def test_what_load_would_refuse_is_not_saved(tmp_path: Path) -> None:
    cluster = Cluster.from_yaml(PLAIN)
    odd = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory_bytes=3))
    with pytest.raises(ClusterError, match="3 bytes"):
        odd.save(tmp_path / "c.yaml")
    assert not (tmp_path / "c.yaml").exists()


# ---------------------------------------------------------------- presets


WANTED = {"a100-40", "a100-80", "h100", "h200", "b200", "mi300x", "ascend-910", "ascend-910b", "cpu"}


def test_the_presets_there_are() -> None:
    assert set(presets.names()) == WANTED


@pytest.mark.parametrize("name", sorted(WANTED))
def test_a_preset_is_a_machine(name: str) -> None:
    cluster = Cluster.preset(name, nodes=2)
    assert cluster.ranks == 16
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster
    device, rates = cluster.device, [level.bytes_per_s for level in cluster.levels]
    assert rates == sorted(rates), "the outermost level is the slowest"
    assert [level.latency_seconds for level in cluster.levels] == sorted(
        (level.latency_seconds for level in cluster.levels), reverse=True
    )
    assert rates[-1] < device.memory_bytes_per_s, "no link is faster than the device's own memory"
    narrow = device.flops.get("bf16", device.flops["f16"])
    assert device.flops["f32"] < narrow
    # Operators per byte: data-centre devices of these years need 16 (a processor) to 400 FLOP per byte to be busy.
    assert 10 < narrow / device.memory_bytes_per_s < 500
    # A device reads its whole memory in 10 ms to 1 s.
    assert 0.01 < device.memory_bytes / device.memory_bytes_per_s < 1
    if "f8e4m3" in device.flops:
        assert device.flops["f8e4m3"] == pytest.approx(2 * narrow, rel=1e-3)
    if name != "cpu":  # whose ranks compute in the host's memory
        assert cluster.host_memory_bytes > 0
        assert 0 < cluster.host_bytes_per_s < rates[-1]


@pytest.mark.parametrize("name", sorted(WANTED))
def test_every_number_of_a_preset_has_a_source(name: str) -> None:
    rows = (Path(presets.__file__).parent / "machines" / f"{name}.yaml").read_text().splitlines()
    for before, row in itertools.pairwise(rows):
        key, _, value = row.partition("#")[0].strip().removeprefix("- ").partition(":")
        if value.strip()[:1].isdigit() and key not in ("size", "meshwright cluster") and "name" not in key:
            assert "[" in row.partition("#")[2] or "[" in before.partition("#")[2], row


def test_generations_grow() -> None:
    order = [Cluster.preset(n).device for n in ("a100-40", "a100-80", "h100", "h200", "b200")]
    for old, new in itertools.pairwise(order):
        assert new.flops["bf16"] >= old.flops["bf16"]
        assert new.memory_bytes_per_s > old.memory_bytes_per_s
        assert new.memory_bytes >= old.memory_bytes


@pytest.mark.parametrize(
    ("name", "nodes", "per_node", "levels"),
    [
        ("h100", 1, 1, {"node": 1}),
        ("h100", 1, 8, {"gpu": 8}),
        ("h100", 3, 1, {"node": 3}),
        ("H100", 2, 4, {"node": 2, "gpu": 4}),
        ("ascend-910", 2, 8, {"node": 2, "board": 2, "npu": 4}),
        ("Ascend 910", 2, 4, {"node": 2, "npu": 4}),
        ("910B", 1, 2, {"npu": 2}),
    ],
)
def test_ranks_fill_a_node_from_the_inside(name, nodes, per_node, levels) -> None:
    cluster = Cluster.preset(name, nodes, per_node)
    assert {level.name: level.size for level in cluster.levels} == levels
    assert cluster.ranks == cluster.mesh.size == nodes * per_node


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("h10",), "did you mean 'h100'"),
        (("gaudi",), "known: "),
        (("h100", 0), "nodes is 0"),
        (("h100", 2, 2.0), "ranks_per_node is 2.0"),
        (("h100", True), "nodes is True"),
        (("h100", 2, 16), "nodes=4, ranks_per_node=8"),
        (("ascend-910", 2, 6), "do not fill groups of 4"),
        (("h100", 1 << 20, 8), "8,388,608 ranks"),
    ],
)
def test_a_preset_that_cannot_be(arguments, says: str) -> None:
    with pytest.raises(ClusterError) as error:
        Cluster.preset(*arguments)
    assert says in str(error.value)


def test_16384_ranks_have_a_mesh_and_prices() -> None:
    cluster = Cluster.preset("h100", nodes=2048)
    mesh = cluster.place(Mesh.of(pp=8, dp=64, tp=32))
    seconds = cluster.prices.seconds("all_reduce", cluster.mesh, [a.name for a in cluster.mesh.axes], 1e9)
    assert cluster.mesh.size == 16_384
    # Eight network ports a node carry what the eight ranks of a node send: 400 GB/s, less than NVLink.
    assert seconds == pytest.approx(2 * 11 * 4e-6 + 2 * 3 * 1.9e-6 + 1e9 / 400e9)
    # tp=32 spans four nodes: its three inner axes fill one.
    assert [a.link for a in mesh.axes] == ["node"] * 11 + ["gpu"] * 3


# ---------------------------------------------------------------- this machine


def test_this_machine_is_found() -> None:
    one, four = Cluster.local(1), Cluster.local(4)
    assert four.ranks == 4 and one.ranks == 1
    assert four.device.memory_bytes == local.memory_bytes() // 4
    assert math.isclose(one.device.memory_bytes, 4 * four.device.memory_bytes, rel_tol=1e-6)
    assert 1e8 < one.device.flops["f32"] < 1e15 and 1e8 < one.device.flops["f64"] < 1e15
    assert Cluster.from_yaml(four.to_yaml()) == four


@pytest.mark.parametrize("nproc", [0, -1, 2.0, True, 5000])
def test_a_machine_of_no_ranks(nproc) -> None:
    with pytest.raises(ClusterError, match="1 to 4096"):
        Cluster.local(nproc)
