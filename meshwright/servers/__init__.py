"""Parameter servers: parameters that live in processes of their own, and workers that pull values and push gradients.

`shards.py` says what is stored and on which server; `starts.py` fills rows by seed; `clocks.py` bounds how old a value
may be; `rules.py` and `store.py` hold tensors with torch's optimizers; `server.py` answers messages (`messages.py`),
knows neither sockets nor threads, and applies each push once; `worker.py` splits a request over servers; `local.py`
passes messages within one process. Nothing is unpickled.
"""
