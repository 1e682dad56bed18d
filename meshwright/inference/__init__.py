"""Inference: a model without gradients under any plan (`forward_step.py`), also as files (`exported.py`)."""
