"""The states of the random generators of a process: torch's, Python's, numpy's, and that of its GPU.

(Random operators of a program do not draw from these: they follow from the step's seed and count of steps.)
"""

from __future__ import annotations

import json
import random

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of the random generators of this process, each as bytes."""
    version, words, gauss = random.getstate()
    python = np.array([version, *words], dtype=np.uint32).tobytes() + json.dumps(gauss).encode()
    _, keys, position, has, cached = np.random.get_state(legacy=True)
    numpy = np.asarray(keys, dtype=np.uint32).tobytes() + json.dumps([position, has, cached]).encode()
    found = {
        "torch": torch.get_rng_state(),
        "python": torch.frombuffer(bytearray(python), dtype=torch.uint8),
        "numpy": torch.frombuffer(bytearray(numpy), dtype=torch.uint8),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_random_state(found: dict[str, torch.Tensor], device: torch.device) -> None:
    """The states that `random_state` gave."""
    torch.set_rng_state(found["torch"])
    python, keys = found["python"].numpy().tobytes(), found["numpy"].numpy().tobytes()
    version, *words = np.frombuffer(python[: 4 * 626], dtype=np.uint32).tolist()
    random.setstate((version, tuple(words), json.loads(python[4 * 626 :])))
    np.random.set_state(
        ("MT19937", np.frombuffer(keys[: 4 * 624], dtype=np.uint32), *json.loads(keys[4 * 624 :]))
    )
    if device.type == "cuda" and "cuda" in found:
        torch.cuda.set_rng_state(found["cuda"], device)
