"""100 MB from and to a Ray actor: python -m bench.ps_ray, see `ps.py`. Ray is no dependency of Meshwright."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench.ps import FLOATS, seconds


def main() -> None:
    ray: Any = __import__("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=2 << 30)

    class Holder:
        def __init__(self) -> None:
            self.weight = np.zeros(FLOATS, np.float32)

        def pull(self) -> np.ndarray:
            return self.weight

        def push(self, gradient: np.ndarray) -> None:
            self.weight -= np.float32(0.1) * gradient

    actor = ray.remote(num_cpus=0)(Holder).remote()
    gradient = np.zeros(FLOATS, np.float32)
    ray.get(actor.pull.remote())
    pulled = seconds(lambda: ray.get(actor.pull.remote()))
    pushed = seconds(lambda: ray.get(actor.push.remote(gradient)))
    print(f"Ray {ray.__version__}: pull {0.1 / pulled[0]:.2f}, push {0.1 / pushed[0]:.2f} GB/s")
    ray.shutdown()


if __name__ == "__main__":
    main()
