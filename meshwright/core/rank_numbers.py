"""Three ways to number the ranks of a pipeline: types of their own, since taking one for another goes unnoticed.

With two ranks in each of two stages, world rank 3 is at pipeline rank 1; among those that share its stage it is stage
rank 1. `pipeline.meshes.Meshes` converts. Where there is no pipeline, a rank is a plain ``int``. So is the number of a
stage, which is no pipeline rank: one of those may hold several stages.
"""

from __future__ import annotations

from typing import NewType

WorldRank = NewType("WorldRank", int)
PipelineRank = NewType("PipelineRank", int)
StageRank = NewType("StageRank", int)

__all__ = ["PipelineRank", "StageRank", "WorldRank"]
