"""Spaces of very many nodes as arrays: what differs in sizes alone is priced together. Begin at `prices.py`."""
