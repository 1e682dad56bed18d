"""Published runs: what a file may hold, which plan a run becomes, and how predictions are summed up."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from bench import published
from bench.published_fit import Slopes, fitted, left_out, with_factors
from bench.published_plan import Skipped, asked, cluster_of, partition_of
from bench.published_rows import RUNS, Decoder, Measured, RowError, read
from meshwright.cost.cluster import Cluster
from meshwright.report.estimate import estimate
from meshwright.report.plan_table import plan_text

ALL = read(RUNS)
TINY = Decoder("tiny", 2, 64, 4, 2, 16, 96, 128, glu=True, tied_embeddings=False)
RUN = replace(
    next(run for run in ALL if run.device == "H100-80GB SXM"),
    model=TINY, n_gpus=4, gpus_per_node=4, seq=32, gbs_seqs=8, micro_batch=2, grad_accum=2, tp=2, pp=1, cp=1, dp=2,
    zero_level=1, dp_sharding="", sequence_parallel=True, activation_recompute="none", precision="bf16",
    interconnect=None, derived=Measured(1.0),
)  # fmt: skip


def test_every_published_row_of_the_repository_is_read_with_its_source():
    assert len(ALL) == len({run.id for run in ALL}) > 400
    assert all(run.source.title and run.source.path for run in ALL)
    assert {run.tier for run in ALL} == {"A", "B"}


@pytest.mark.parametrize(
    ("line", "what", "why"),
    [
        ("{", "a line is not JSON", "Expecting"),
        (json.dumps({"id": "x"}), "$.tier of a run is wrong", ""),
        (
            RUNS.read_text().splitlines()[0].replace('"n_gpus": 8', '"n_gpus": "8"'),
            "$.n_gpus of a run is wrong",
            "int",
        ),
    ],
)
def test_a_bad_row_is_refused_by_its_line_and_field(tmp_path, line, what, why):
    path = tmp_path / "runs.jsonl"
    path.write_text(RUNS.read_text().splitlines()[0] + "\n\n" + line + "\n")
    with pytest.raises(RowError, match=r"runs\.jsonl:3") as error:
        read(path)
    assert error.value.what == what and why in error.value.why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"precision": "fp8"}, "fp8 products"),
        ({"device": "GB200-NVL72"}, "no preset"),
        ({"dp": 4}, "are not tp"),
        ({"gbs_seqs": 9}, "accumulation"),
        ({"pp": 2, "dp": 1, "gbs_seqs": 4, "pp_schedule": "V-half"}, "schedule V-half"),
    ],
)
def test_what_no_plan_expresses_is_skipped_with_the_reason(change, why):
    with pytest.raises(Skipped, match=why):
        asked(replace(RUN, **change))


def test_a_run_becomes_megatrons_plan_with_its_zero_level():
    parts = partition_of(RUN)
    text = plan_text(parts)
    assert "v=tp" in text and "k=tp" in text and "a1=tp" in text
    assert "reduce_scatter(tp)" in text and "all_gather(tp)" in text
    assert parts.plan.techniques.optimizer_parallel == 1 and parts.micro_batches == 2


def test_stages_of_an_interleaved_schedule_follow_the_run():
    run = replace(RUN, tp=1, pp=2, dp=2, virtual_pp=1, model=replace(TINY, layers=4), pp_schedule="1F1B")
    plain = partition_of(run).plan
    interleaved = partition_of(replace(run, virtual_pp=2, pp_schedule="interleaved 1F1B")).plan
    assert len(set(plain.stages.values())) == 2 and len(set(interleaved.stages.values())) == 4
    cluster = Cluster.preset("h100", nodes=1, ranks_per_node=4)
    assert estimate(partition_of(run), cluster, 6).step_seconds > 0


@pytest.mark.parametrize(
    ("text", "gigabytes"),
    [
        ("NVLink in node; 4x100 Gb/s Omni-Path per node", 6.25),
        ("NVLink in node; RDMA 400 Gb/s per GPU", 50.0),
        ("GCP A3 (TCPX, ~1.6 Tb/s per node)", 25.0),
        ("NVLink; inter-node not stated", 50.0),
    ],
)
def test_the_network_is_the_one_that_the_source_names(text, gigabytes):
    cluster = cluster_of(replace(RUN, n_gpus=16, gpus_per_node=8, interconnect=text))
    assert cluster.levels[0].bytes_per_s == gigabytes * 1e9


def test_errors_order_and_memory_are_summed_up():
    def outcome(name, measured, predicted, group="g", memory=None, peak=1e9, status="ok"):
        run = replace(
            RUN, id=name, derived=Measured(measured), rank_group=group, memory=memory, status=status
        )
        return published.Outcome(run, predicted, peak, 80e9)

    found = [
        outcome("a", 1.0, 1.1, memory="2 GB"),
        outcome("b", 2.0, 1.0),
        outcome("c", 2.01, 3.0),
        outcome("d", None, 1.0, peak=90e9, status="oom"),
    ]
    assert published.ordered(found) == (1, 2)  # b and c are a tie; a before b is wrong, a before c is right
    (total, *_) = published.summary(found)
    assert total == ["all", "3", "+3.1%", "36.4%", "-50.0%", "1 of 2", "50.0% of 1"]
    assert published.fitting(found).startswith("out of memory: 1 of 1 predicted so; fits: 3 of 3")


def test_the_table_is_printed_and_written(tmp_path, capsys):
    path, out = tmp_path / "runs.jsonl", tmp_path / "out.json"
    row = json.loads(RUNS.read_text().splitlines()[0])
    sizes = {"layers": 1, "hidden": 64, "heads": 4, "kv_heads": 4, "head_dim": 16, "ffn": 96, "vocab": 128}
    row |= {"model": row["model"] | sizes, "seq": 32}
    changes = {}, {"id": "pub-x", "tier": "C"}, {"id": "pub-y", "device": "GB200-NVL72"}
    path.write_text("\n".join(json.dumps(row | change) for change in changes))
    published.main(["--rows", str(path), "--json", str(out), "--markdown"])
    shown = capsys.readouterr().out
    assert "2 skipped: 1 tier C; 1 no preset of GB200-NVL72" in shown and "| all | 1 |" in shown
    assert [bool(one["skipped"]) for one in json.loads(out.read_text())] == [False, True, True]


def test_a_planted_factor_is_found_and_a_source_is_evaluated_without_itself():
    def row(source, products, memory, slower):
        seconds = {"matmul": products, "attention": 0.0, "memory": memory, "launch": 0.0, "waited": 0.0}
        measured = slower * (products + memory) + 0.1
        total = products + memory + 0.1
        overlapped = {"hidden": 0.0, "hidden_rows": 0.0}
        return Slopes(source, "a device", "fused", measured, total, seconds | overlapped)

    honest = [row(f"s{n}", 1.0 + n, 2.0, 1.1) for n in range(6)]
    odd = row("odd", 2.0, 1.0, 3.0)
    factors = fitted(honest)
    assert all(abs(with_factors(one, factors) / one.measured - 1) < 0.02 for one in honest)
    errors = left_out([*honest, odd])
    assert errors[-1] == pytest.approx(with_factors(odd, factors) / odd.measured - 1)
    assert errors[-1] < -0.5 and max(map(abs, errors[:-1])) < 0.1
