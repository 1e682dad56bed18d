"""Training: `train_step` builds, in each launched process, the `TrainStep` that does forward, backward and update."""

from meshwright.train.build import shutdown, train_step
from meshwright.train.step import TrainStep

__all__ = ["TrainStep", "shutdown", "train_step"]
