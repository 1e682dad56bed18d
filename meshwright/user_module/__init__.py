"""The user's module while a step trains it: without values (`hollow.py`), and full again on request (`full_model.py`).

`placeholders.py` says what a tensor without values may still be asked for.
"""
