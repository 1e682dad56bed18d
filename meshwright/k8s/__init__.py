"""Jobs on Kubernetes: the resource `ParallelJob`, and the operator that runs it (``pip install "meshwright[k8s]"``).

`resource.py` is the resource as typed records, `schema.py` makes its definition from them. `checks.py`, `command.py`
and `fields.py` refuse what a schema cannot. `pods.py` says which objects a job consists of, `decide.py` what to do next
(`servers.py`, `planning.py` and `queue.py` for a part of it): plain functions on records. `api.py`, `login.py`,
`read_plan.py` and `operator.py` are the only modules that reach a cluster. `manifests.py` and `convert.py` write and
read files of other controllers.
"""
