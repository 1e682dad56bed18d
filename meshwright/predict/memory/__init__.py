"""Predict the bytes that live at once on a rank in each phase of a step. Start reading at `step.py`."""
