"""The parameters, buffers and constants of one rank: what its program reads, and what of it the rank updates."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from dataclasses import replace

import torch

from meshwright.core.graph import Input, TensorType
from meshwright.core.layout import TensorLayout, dim_axes
from meshwright.core.rank_numbers import PipelineRank
from meshwright.partition import Partition
from meshwright.partition.sharded_update import gathers, update_layout, updates
from meshwright.runtime.dtypes import TORCH_DTYPES
from meshwright.runtime.host_update import HostUpdate
from meshwright.runtime.local_batch import place_of, slicer
from meshwright.runtime.optimizers import Nothing
from meshwright.runtime.parameter_offload import HostParameters
from meshwright.runtime.pipeline_rank import Pipeline
from meshwright.runtime.rank import Rank
from meshwright.runtime.sharded_update import ShardedUpdate
from meshwright.runtime.state import State, StoredTensor


class RankWeights:
    """The weights of a rank, under the plan of one program over its `State`.

    - `leaves`: input of the program → what it reads. `weights`: the trained ones among them.
    - `parameters`: name → what this rank updates of a parameter, a leaf whose ``.grad`` is its shard of the gradient:
      the same tensors, unless weights are gathered again after an update of shards.
    - `host_parameters`: those offloaded to host memory. `sharded`: updates of shards; `hosted`: those on the host.
    """

    def __init__(
        self,
        parts: Partition,
        rank: Rank,
        state: State,
        pipe: Pipeline | None,
        values: Mapping[str, torch.Tensor],
        held: Collection[str],
        bucket_bytes: int | None,
    ) -> None:
        """`values`: input name → full tensor, or this rank's shard already for the names in `held`. `bucket_bytes`: of
        weights that are gathered together, instead of what the plan says."""
        self.parts, self.rank, self.state, self.pipe = parts, rank, state, pipe
        self.layouts, self.mesh = parts.resharded.layouts, rank.comm.mesh
        self.inputs = {i.name: i for i in parts.resharded.graph.inputs}
        self._named = {(i.role, i.target): i.name for i in self.inputs.values()}
        self.leaves: dict[str, torch.Tensor] = {}
        self.weights: dict[str, torch.nn.Parameter] = {}
        self.parameters: dict[str, torch.nn.Parameter] = {}
        for name, entry in self.inputs.items():
            if entry.role in ("parameter", "buffer"):
                if pipe is not None and entry.target in state.kept and pipe.reads_nowhere(name):
                    pipe.holders[name] = state.kept[entry.target].holders
                state.keep(self._kept(entry))
            if entry.role != "batch" and (pipe is None or pipe.holds(name)):
                self._make_leaf(entry, values, name in held)
        self.host_parameters = self._host_parameters()
        self.sharded = self._split_updates(bucket_bytes)
        self.hosted: HostUpdate | None = None
        if "optimizer" in parts.plan.techniques.offload:
            targets = {self.inputs[n].target: home for n, home in self.host_parameters.homes.items()}
            self.hosted = HostUpdate(self.parameters, targets, state.updated)
            self.parameters = dict(self.hosted.masters)
        state.updated |= self.parameters
        self._add_shards()
        state.publishers[frozenset(self.parameters)] = functools.partial(_publish, self.hosted, self.sharded)

    @property
    def apart(self) -> bool:
        """True if an update writes to other tensors than those that the program reads."""
        return bool(self.sharded.shards or self.hosted is not None or self.host_parameters.homes)

    def named(self, role: str, target: str) -> str:
        """The program's input for a parameter or buffer of the model."""
        return self._named[role, target]

    @property
    def offered(self) -> dict[str, torch.nn.Parameter]:
        """Of what an optimizer is made: `parameters`, and in their order `Nothing` for what other stages train."""
        trained = {i.target: i.type for i in self.inputs.values() if i.role == "parameter" and i.needs_grad}

        def nothing(kind: TensorType) -> Nothing:
            shape, dtype = (0, *kind.shape[1:]), TORCH_DTYPES[kind.dtype]
            return Nothing(torch.empty(shape, dtype=dtype, device=self.rank.device))

        return {
            name: self.parameters[name] if name in self.parameters else nothing(kind)
            for name, kind in trained.items()
        }

    def layout_of(self, parameter: str) -> TensorLayout:
        """The layout in which this rank updates a parameter: that of `parameters`."""
        return update_layout(self.parts, self.inputs[self._named["parameter", parameter]])

    def axes_of(self, parameter: str) -> tuple[str, ...]:
        """The axes that shard what this rank updates of a parameter."""
        axes = {a for d in self.layout_of(parameter).dims for a in dim_axes(d) if self.mesh.sizes[a] > 1}
        return self.mesh.sort(axes)

    def _make_leaf(self, entry: Input, values: Mapping[str, torch.Tensor], held: bool) -> None:
        """Return the tensor that the program reads: its own constant, or the state's shard of a parameter or buffer."""
        trained = entry.role == "parameter" and entry.needs_grad

        def shard() -> torch.Tensor:
            value = values[entry.name].to(place_of(entry.name, self.parts, values[entry.name].device))
            if held:
                return value.detach()
            local = slicer(self.layouts[entry.name], self.mesh, self.rank.comm.rank)(value.detach())
            # A replicated tensor keeps the user's memory; a shard gets memory of its own, so the rest can be freed.
            if local.shape == value.shape and (not trained or isinstance(value, torch.nn.Parameter)):
                return local
            return local.clone(memory_format=torch.contiguous_format)

        leaf = self.leaves[entry.name] = (
            shard() if entry.role == "constant" else self.state.shard(entry, shard)
        )
        if trained:
            assert isinstance(leaf, torch.nn.Parameter)
            self.parameters[entry.target] = self.weights[entry.name] = leaf

    def _add_shards(self) -> None:
        """Note which of the parameters are shards, or copies that programs do not read, before a user has them."""
        for target, parameter in self.parameters.items():
            name = self._named["parameter", target]
            axes = [dim_axes(d) for d in self.layout_of(target).dims]
            dims = frozenset(i for i, found in enumerate(axes) if any(self.mesh.sizes[a] > 1 for a in found))
            apart = (
                name in self.sharded.shards or self.hosted is not None or name in self.host_parameters.homes
            )
            self.state.access.add(target, parameter, dims, apart)

    def _kept(self, entry: Input) -> StoredTensor:
        """How the ranks have a parameter or a buffer under the program's plan."""
        trained = entry.role == "parameter" and entry.needs_grad
        updated = self.parts.plan.states.get(entry.name) if trained else None
        holders = (PipelineRank(0),) if self.pipe is None else self.pipe.holders[entry.name]
        return StoredTensor(entry, self.layouts[entry.name].forward, updated, trained, holders)

    def _host_parameters(self) -> HostParameters:
        """The parameters that live on the host, brought there where no other program has done so."""
        here = {n: self.leaves[n] for n in self.parts.resharded.host_parameters if n in self.leaves}
        homes = {n: self.state.homes[t] for n in here if (t := self.inputs[n].target) in self.state.homes}
        found = HostParameters(here, self.rank.device, homes)
        self.state.homes |= {self.inputs[n].target: home for n, home in found.homes.items()}
        return found

    def _split_updates(self, bucket_bytes: int | None) -> ShardedUpdate:
        """The parts of weights that this rank updates, in the place of the weights among the parameters."""
        kinds = (w.device.type for w in self.weights.values())
        device = next((kind for kind in kinds if kind != "cpu"), "cpu")
        mine = {name: update for name, update in updates(self.parts).items() if name in self.weights}
        groups = (
            replace(group, members=tuple(m for m in group.members if m.name in mine))
            for group in gathers(self.parts, bucket_bytes, device)
        )
        known = {n: self.state.shards.get(self.inputs[n].target) for n in mine}
        made = ShardedUpdate(self.rank.comm, mine, self.weights, [g for g in groups if g.members], known)
        for name, shard in made.shards.items():
            self.parameters[self.inputs[name].target] = shard.leaf
            self.state.shards[self.inputs[name].target] = shard.leaf
        return made


def _publish(hosted: HostUpdate | None, sharded: ShardedUpdate) -> None:
    if hosted is not None:
        hosted.give_back()
    sharded.gather()


__all__ = ["RankWeights"]
