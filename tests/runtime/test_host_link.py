"""A copy keeps its source until computation has waited for it."""

from __future__ import annotations

import gc
import weakref

import torch

from meshwright.runtime.host_link import Copy, HostLink


def test_a_copy_has_the_values_and_lets_go_of_its_source() -> None:
    source = torch.randn(3, 4).t()
    copy = HostLink(torch.device("cpu")).out(source)
    there = copy.take()
    assert torch.equal(there, source) and there.stride() == source.stride()
    assert there.data_ptr() != source.data_ptr() and copy.size_bytes == 48


def test_a_source_lives_until_the_copy_is_taken_or_gone() -> None:
    def under_way() -> tuple[Copy, weakref.ref[torch.Tensor]]:
        source = torch.ones(4)
        return Copy(source.clone(), source), weakref.ref(source)

    copy, source = under_way()
    assert source() is not None
    copy.take()
    assert source() is None
    copy, source = under_way()
    del copy
    gc.collect()
    assert source() is None
