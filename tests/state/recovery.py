"""`bench.recovery_run`, of which rank 1 ends itself in the middle of its third save, once, where it is asked to.

recovery.py FOLDER STEPS [save]
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

from bench.recovery_run import main
from meshwright.checkpoint import safetensors_io as tensor_file


def die_in_the_third_save(once: Path) -> None:
    write, count = tensor_file.write, [0]

    def half(path: Path, tensors: Any, notes: Any) -> Any:
        count[0] += 1
        if count[0] == 3:
            write(path, tensors[: len(tensors) // 2], notes)
            once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, tensors, notes)

    tensor_file.write = half


if __name__ == "__main__":
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    once = folder / "killed"
    if sys.argv[3:] == ["save"] and os.environ["RANK"] == "1" and not once.exists():
        die_in_the_third_save(once)
    main(folder, steps)
