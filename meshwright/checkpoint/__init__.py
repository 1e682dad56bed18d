"""Checkpoints: what a step holds, as files that any other plan reads.

`held.py` lists what a rank holds, `share.py` who of those that hold the same writes it, `saving.py` and `writing.py`
write it, `loading.py` reads it back. Files: `tensor_file.py` (safetensors), `index.py` (which parts there are, with
checksums) and `folder.py` (what makes a folder a whole checkpoint). `sources.py` opens what comes from elsewhere.
"""
