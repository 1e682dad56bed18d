"""Checkpoints: the state of a step, in files that any other plan can read.

`step_state.py` lists the tensors that a rank holds, `ownership.py` decides which of several replicas writes a box,
`save.py` and `write.py` write, `load.py` and `fill.py` read back. Files: `safetensors_io.py`, `index.py` (which boxes
there are, with checksums) and `folder.py` (how a folder becomes a complete checkpoint). `sources.py` opens weights from
elsewhere.
"""
