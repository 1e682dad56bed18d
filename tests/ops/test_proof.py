"""A rule is a claim; here each is proved, for every operator, every way to cut it, on two ranks and on three."""

import pytest
import torch

from meshwright.ops.special import SPECIAL
from meshwright.ops.table import LINES
from tests.ops.prove import prove_all, prove_pairs
from tests.ops.samples import SAMPLES


def available(op: str) -> bool:
    """Operators of optional packages are proved where those are installed."""
    if op.startswith("transformers."):
        pytest.importorskip("transformers.integrations.moe")
    return True


def test_every_operator_with_a_rule_has_a_sample():
    assert sorted((set(LINES) | set(SPECIAL)) - set(SAMPLES)) == []


def test_every_sample_is_of_an_operator_with_a_rule():
    assert sorted(set(SAMPLES) - (set(LINES) | set(SPECIAL))) == []


CASES = [pytest.param(op, k, id=f"{op}-{k}") for op, builds in SAMPLES.items() for k in range(len(builds))]


@pytest.mark.parametrize(("op", "k"), CASES)
def test_cut_pieces_rejoin_to_the_whole(op: str, k: int):
    """On two ranks, on two axes at once, and the first sample of each operator on three ranks."""
    assert available(op)
    torch.set_num_threads(1)
    case = SAMPLES[op][k]()
    proofs = prove_all(case, 2) + prove_pairs(case) + (prove_all(case, 3) if k == 0 else 0)
    rule = case.site.rule
    free = [
        x for x in rule.sizes if x not in rule.replicated and not x.startswith("whole_") and rule.sizes[x] > 2
    ]
    assert proofs or not free


@pytest.mark.slow
@pytest.mark.parametrize(("op", "k"), [case for case in CASES if case.values[1]])
def test_pieces_of_three_ranks_rejoin_to_the_whole(op: str, k: int):
    assert available(op)
    torch.set_num_threads(1)
    prove_all(SAMPLES[op][k](), 3)
