"""Models to try things on, in plain PyTorch and from transformers; each has `build(...) -> (model, batch, loss)`."""
