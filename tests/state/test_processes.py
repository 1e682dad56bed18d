"""Checkpoints of real ranks: saved on two, loaded on three; a rank killed in the middle of a save; a full disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import run_script
from tests.runtime.test_processes import COMMON, succeed

pytestmark = pytest.mark.procs

TWO = """
import os
from pathlib import Path
from meshwright.checkpoint import safetensors_io as tensor_file
model, batch, loss = gpt.build(batch=6)
step = mw.train_step(model, adamw, batch, loss=loss, mesh=2, optimizer_parallel=2, threshold_kb=0)
step(batch)
step.save("ckpt", async_=True)
step(batch)
step.wait()
state = step.full_state()
if step.rank == 0:
    torch.save(state, "expected.pt")
"""
THREE = """
model, batch, loss = gpt.build(batch=6, seed=5)
step = mw.train_step(model, adamw, batch, loss=loss, mesh=3, optimizer_parallel=3, threshold_kb=0)
found = step.load("ckpt")
assert found.step == WANTED, found
state = step.full_state()
if WANTED == 2:
    assert all(torch.equal(state[n], v) for n, v in torch.load("expected.pt").items())
step(batch)
step.save("ckpt")
mw.shutdown()
"""


def test_saved_on_two_ranks_loaded_on_three(tmp_path: Path) -> None:
    succeed(tmp_path, 2, TWO + "step.save('ckpt')\nmw.shutdown()\n")
    succeed(tmp_path, 3, "WANTED = 2\n" + THREE)
    assert (tmp_path / "ckpt" / "latest").read_text() == "step-00000003\n"


def test_a_rank_killed_while_it_saves_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    killed = """
    write = tensor_file.write
    def half(path, tensors, notes):
        write(path, tensors[: len(tensors) // 2], notes)
        os.kill(os.getpid(), 9)
    if step.rank == 1:
        tensor_file.write = half
    step.save("ckpt")
    """
    assert run_script(tmp_path, 2, COMMON + TWO + killed.replace("\n    ", "\n")).returncode == 137
    folder = tmp_path / "ckpt"
    assert sorted(p.name for p in folder.iterdir() if p.name[0] != ".") == ["latest", "step-00000001"]
    assert len(list(folder.glob(".saving-*"))) == 1
    succeed(tmp_path, 3, "WANTED = 1\n" + THREE)
    assert not list(folder.glob(".saving-*"))


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """One rank may write no file larger than 50 kB: its writes fail as they do on a full disk."""
    full = """
    import resource, signal
    if step.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    try:
        step.save("ckpt")
    except mw.MeshwrightError as error:
        text = str(error)
        assert "could not be written: rank00001.safetensors" in text and "make room" in text, text
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print("refused", flush=True)
    assert step.load("ckpt").step == 1
    mw.shutdown()
    """
    assert "refused" in succeed(tmp_path, 2, TWO + full.replace("\n    ", "\n"))


@pytest.mark.slow
def test_fsdp_loads_what_we_have_saved(tmp_path: Path) -> None:
    fsdp = """
    from torch.distributed import checkpoint
    from torch.distributed.fsdp import fully_shard
    twin, _, _ = gpt.build(batch=6, seed=5)
    for block in twin.blocks:
        fully_shard(block)
    fully_shard(twin)
    found = {"model": twin.state_dict()}
    checkpoint.load(found, storage_reader=mw.CheckpointReader("ckpt"))
    state = step.full_state()
    for name, value in twin.state_dict().items():
        assert torch.equal(value.full_tensor(), state[name]), name
    mw.shutdown()
    """
    succeed(tmp_path, 2, TWO + "step.save('ckpt')" + fsdp.replace("\n    ", "\n"))
