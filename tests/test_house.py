"""The house rules that a machine can check: layers, purity, and that `make lint` finds private names of torch."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PURE = (
    "errors heartbeat scheduler launchers core ops redistribute cost plan partition pipeline predict search "
    "report"
).split()
BUILT = [
    n
    for n in PURE
    if (ROOT / f"meshwright/{n}.py").exists() or (ROOT / f"meshwright/{n}/__init__.py").exists()
]


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def check_torch(*paths: object) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, str(ROOT / "tools/check_torch_imports.py"), *map(str, paths))


def test_layers_hold():
    done = run(
        sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()", "--no-cache"
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_built_floor_of_the_middle_is_checked_for_purity():
    contracts = {c["id"]: c for c in PYPROJECT["tool"]["importlinter"]["contracts"]}
    assert set(contracts["pure"]["source_modules"]) == {f"meshwright.{n}" for n in BUILT}, (
        "extend the contract `pure` in pyproject.toml with the floor that was built"
    )


def test_types_are_checked_and_strictly_in_what_all_else_stands_on():
    pyright = PYPROJECT["tool"]["pyright"]
    assert pyright["include"] == ["meshwright", "bench", "tools"]
    assert pyright["typeCheckingMode"] == "standard"
    assert pyright["strict"] == [f"meshwright/{n}" for n in ("core", "ops", "redistribute", "cost", "plan")]


def test_what_the_runtime_may_know_is_checked():
    contracts = {c["id"]: c for c in PYPROJECT["tool"]["importlinter"]["contracts"]}
    built = {
        f"meshwright.{n}"
        for n in ("predict", "search", "cost", "capture")
        if (ROOT / f"meshwright/{n}/__init__.py").exists()
    }
    assert set(contracts["runtime"]["forbidden_modules"]) == built, (
        "extend the contract `runtime` in pyproject.toml"
    )


@pytest.mark.parametrize("name", ["", *BUILT])
def test_the_middle_loads_without_torch(name):
    module = f"meshwright.{name}".rstrip(".")
    done = run(sys.executable, "-c", f"import sys, {module}; assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "import torch._dynamo as d",
        "import torch.nn, torch._inductor.config",
        "from torch import _C",
        "from torch._C import Graph",
        "from torch.distributed import _functional_collectives as f",
        "from torch.distributed._tensor import DTensor",
        "import torch\ntorch._C",
        "import torch as t\nt._C._jit_clear()",
        "import torch.distributed as dist\ndist.nn._x",
        "from torch import nn\nnn._reduction.get_enum",
        "import torch.nn\ntorch.nn.functional._canonical_mask",
        "def f():\n    import torch\n    return torch._foobar",
        "import torch\ngetattr(torch, '_C')",
        "import importlib\nimportlib.import_module('torch._dynamo')",
    ],
)
def test_a_planted_private_name_is_found(tmp_path, source):
    planted = tmp_path / "planted.py"
    planted.write_text(source)
    done = check_torch(tmp_path)
    assert done.returncode == 1
    assert f"{planted}:" in done.stdout


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__",
        "import torch\nx = torch.ones(1)\nx._base",
        "import numpy as np\nnp._core",
        "from ._torch import _x",
        "import torch\nself = torch.nn.Module()\nself._x = 1",
    ],
)
def test_what_is_not_a_private_name_is_left_alone(tmp_path, source):
    (tmp_path / "planted.py").write_text(source)
    assert check_torch(tmp_path).returncode == 0


def test_public_names_resolve_and_a_wrong_one_gets_a_hint():
    import meshwright

    assert meshwright.Mesh.__module__ == "meshwright.core.mesh"
    with pytest.raises(AttributeError, match="did you mean 'Mesh'"):
        meshwright.Mseh  # noqa: B018
