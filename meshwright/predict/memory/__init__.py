"""The bytes that live at once on a rank, phase by phase of a step. Begin at `step.py`."""
