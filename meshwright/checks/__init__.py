"""What is checked before a step is built, and again at every call.

`input_checks.py` and `model_checks.py` check what a user passes; `rank_agreement.py` and `same_values.py` that all
ranks have built the same. `guards.py` compares the Python values that a capture has frozen, quickly thanks to
`conjunction.py`.
"""
