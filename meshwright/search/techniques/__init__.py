"""The techniques that a user asked for, put into a plan one after the other. Begin at `apply.py`."""
