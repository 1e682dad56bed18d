"""A plan (`plan.py`), and its file (`file.py`)."""
