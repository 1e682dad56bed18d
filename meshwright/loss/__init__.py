"""The loss of a step: how it is called and returned (`loss_value.py`), and computed beside training (`evaluation.py`).

`mean_loss.py` finds out whether it is a mean over the rows of a batch, and `example_count.py` how many rows there are:
workers with uneven batches need both.
"""
