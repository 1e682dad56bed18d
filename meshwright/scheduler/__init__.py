"""The scheduler of a job over several machines: who belongs to it, and the keys and values in which its ranks meet.

`messages.py` lists everything that is said and how it is framed; `trust.py` has the secret, the proof of it and TLS;
`state.py` what outlives the process; `members.py` decides who is in, without any socket; `server.py` answers;
`client.py` asks, and asks again when the connection is lost; `gather.py` waits for the others. Commands never
travel: each machine starts what was typed there. Nothing is unpickled, and nothing imports torch.
"""
