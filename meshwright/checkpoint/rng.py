"""The states of the random generators of a process: torch's, Python's, numpy's, and that of its GPU.

(Random operators of a program do not draw from these: they follow from the step's seed and count of steps.)
"""

from __future__ import annotations

import json
import random
import zlib
from typing import Any

import numpy as np
import torch

from meshwright.errors import DamagedError


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of the random generators of this process, each as bytes."""
    found = {"torch": torch.get_rng_state(), "python": _python(random), "numpy": _numpy(np.random)}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def begun_anew(found: dict[str, torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """States for a rank that was not there when those of another were saved: they follow from these and its number."""
    seed = zlib.crc32(found["torch"].numpy().tobytes(), rank)
    made = {
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "python": _python(random.Random(seed)),
        "numpy": _numpy(np.random.RandomState(seed)),
    }
    if "cuda" in found:
        made["cuda"] = torch.Generator("cuda").manual_seed(seed).get_state()
    return made


def _python(generator: Any) -> torch.Tensor:
    version, words, gauss = generator.getstate()
    data = np.array([version, *words], dtype=np.uint32).tobytes() + json.dumps(gauss).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _numpy(generator: Any) -> torch.Tensor:
    _, keys, position, has, cached = generator.get_state(legacy=True)
    data = np.asarray(keys, dtype=np.uint32).tobytes() + json.dumps([position, has, cached]).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def set_random_state(found: dict[str, torch.Tensor], device: torch.device) -> None:
    """The states that `random_state` gave. Raises DamagedError for others."""
    try:
        _set(found, device)
    except (KeyError, RuntimeError, TypeError, ValueError) as error:
        raise DamagedError(
            "the random generator states in the checkpoint are not valid",
            why=f"{error!s:.200}",
            hint="step.load(path, random=False) leaves the generators as they are",
        ) from None


def _set(found: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(found["torch"])
    python, keys = found["python"].numpy().tobytes(), found["numpy"].numpy().tobytes()
    version, *words = np.frombuffer(python[: 4 * 626], dtype=np.uint32).tolist()
    random.setstate((version, tuple(words), json.loads(python[4 * 626 :])))
    np.random.set_state(
        ("MT19937", np.frombuffer(keys[: 4 * 624], dtype=np.uint32), *json.loads(keys[4 * 624 :]))
    )
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)
