"""Height and width of images cut over ranks: ResNet and pools with windows that reach over to the neighbours."""

from __future__ import annotations

import pytest
import torch

import meshwright as mw
from meshwright.examples import zoo
from tests.breadth import first, quick


class Small(torch.nn.Module):
    """Windows of all kinds: wide ones, strides, dilation, groups, a kernel smaller than its stride."""

    def __init__(self) -> None:
        super().__init__()
        n = torch.nn
        self.body = n.Sequential(
            n.Conv2d(3, 8, 7, stride=2, padding=3), n.BatchNorm2d(8), n.ReLU(), n.MaxPool2d(3, 2, 1),
            n.Conv2d(8, 8, 3, padding=2, dilation=2, groups=2), n.Tanh(), n.AvgPool2d(3, 1, 1),
            n.Conv2d(8, 8, 1, stride=2), n.Conv2d(8, 8, 5, padding="same"), n.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.head = n.Linear(8, 5)

    def forward(self, x):
        return self.head(self.body(x).flatten(1))


def small(height: int, width: int):
    torch.manual_seed(0)
    batch = {"x": torch.randn(2, 3, height, width), "y": torch.tensor([1, 3])}
    return Small(), batch, lambda m, b: torch.nn.functional.cross_entropy(m(b["x"]), b["y"])


@pytest.mark.parametrize(
    ("mesh", "pins", "size"),
    [
        ({"h": 2}, {"body.0": {"y0": "h"}}, (32, 32)),
        ({"h": 3}, {"body.0": {"y0": "h"}}, (48, 16)),
        ({"h": 3}, {"body.0": {"y0": "h"}}, (40, 16)),  # 5 rows at the end, for 3 ranks: 2, 2, 1
        ({"h": 4}, {"body.0": {"y0": "h"}}, (40, 16)),  # 2, 2, 1 and none
        ({"h": 2, "w": 2}, {"body.0": {"y0": "h", "y1": "w"}}, (32, 16)),
        (
            {"h": 4},
            {"body.0": {"y1": "h"}},
            (8, 32),
        ),  # one column of windows each: halos of more than a neighbour
    ],
)
@quick(lambda mesh, **_: mesh == {"h": 4} or len(mesh) == 2)
def test_windows_over_a_cut_image(mesh, pins, size) -> None:
    model, batch, loss = small(*size)
    plan = mw.plan(model, batch, loss=loss, mesh=mesh, mode="sharding_propagation", pins=pins)
    assert "h" in str(plan.inputs["batch_x"]) or "w" in str(plan.inputs["batch_x"])
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.full  # the test before has its windows in a smaller model
@pytest.mark.parametrize("mesh", first(1, ({"dp": 2, "h": 2}, {"h": 2})))
def test_resnet_with_its_height_cut(mesh) -> None:
    model, batch, loss = zoo.hugging_face("resnet")
    pins = {"*embedder.embedder.convolution": {"y0": "h"} | ({"n": "dp"} if "dp" in mesh else {})}
    plan = mw.plan(model, batch, loss=loss, mesh=mesh, mode="sharding_propagation", pins=pins)
    assert any("/h" in str(layout) for layout in plan.inputs.values())
    mw.verify(model, batch, loss=loss, plan=plan).raise_if_different()


@pytest.mark.parametrize(
    "asked", first(1, ({"optimizer_parallel": 3}, {"recompute": "full"}, {"micro_batches": 2}))
)
def test_halos_beside_techniques(asked) -> None:
    model, batch, loss = small(32, 16)
    for module in model.modules():  # a batch norm would see a micro-batch
        module.train(not isinstance(module, torch.nn.BatchNorm2d))
    report = mw.verify(
        model, batch, loss=loss, mesh={"h": 2}, mode="sharding_propagation",
        pins={"body.0": {"y0": "h"}}, **asked,
    )  # fmt: skip
    report.raise_if_different()


def test_an_image_that_windows_do_not_divide_stays_whole() -> None:
    model = torch.nn.Conv2d(3, 4, 3)
    batch = torch.randn(2, 3, 16, 16)

    def loss(model, batch):
        return model(batch).square().mean()

    with pytest.raises(mw.MeshwrightError, match="y0"):
        mw.plan(model, batch, loss=loss, mesh={"h": 2}, mode="sharding_propagation", pins={"*": {"y0": "h"}})
