"""The recommender of the examples learns on servers what it learns on one device."""

from __future__ import annotations

import itertools

import torch

import meshwright as mw
from examples import recommender as example
from meshwright.examples.recommender import loss

ROWS = (300, 50, 20)


def test_the_auc_rises_as_on_one_device():
    net, plain = example.model(ROWS), example.model(ROWS, on_servers=False)
    step = mw.parameter_server(net, example.of_layers, loss=loss)
    plain.load_state_dict(step.full_state())
    tables = [*plain.deep_tables.parameters(), *plain.wide_tables.parameters()]
    layers = [p for p in plain.parameters() if not any(p is t for t in tables)]
    own = example.of_tables(tables), example.of_layers(layers)
    before = quality(net)
    for batch in itertools.islice(example.clicks(256, 1, ROWS), 60):
        for optimizer in own:
            optimizer.zero_grad()
        expected = loss(plain, batch)
        expected.backward()
        for optimizer in own:
            optimizer.step()
        torch.testing.assert_close(step(batch), expected.detach(), rtol=1e-4, atol=1e-5)
    assert quality(net) > before + 0.1
    assert abs(quality(net) - quality(plain)) < 1e-3


def quality(net: torch.nn.Module) -> float:
    batch = next(example.clicks(2000, 2, ROWS))
    net.eval()
    with torch.no_grad():
        found = example.auc(net(batch["categories"], batch["dense"]), batch["clicked"])
    net.train()
    return found
