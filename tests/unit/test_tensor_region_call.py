"""A layer keeps a part of the region's input for backward only where a second gather brings back what it has seen."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from framework.comm.communicator import Communicator
from framework.mesh.axis import Axis
from framework.parallel.tensor.async_tp import AsyncGather, AsyncGatherTensor
from framework.parallel.tensor.borders import ReplicatedBorder
from framework.parallel.tensor.regions import Region

ALONE = Communicator(Axis("tp", 1, 0))


class LateBorder(ReplicatedBorder):
    """Hands out what has a shape and no memory, as async TP does."""

    def enter(self, x: Tensor) -> Tensor:
        return AsyncGatherTensor(AsyncGather(x, x.shape[-2], ALONE), x)


def enter(border: ReplicatedBorder) -> tuple[Region, Tensor]:
    region = Region(border, regathers=True)
    return region, region.enter(torch.randn(2, 4, 6, requires_grad=True))


@pytest.mark.parametrize("border", [ReplicatedBorder, LateBorder])
def test_the_input_itself_and_its_rows_in_another_shape_are_brought_back(border: type[ReplicatedBorder]) -> None:
    region, whole = enter(border(ALONE))
    kept = region.call.kept
    assert kept is not None
    assert region.call.find_kept(whole) is kept
    assert region.call.find_kept(whole.view(-1, 6)) is kept
    region.end(whole)
    assert region.call.find_kept(whole) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:1],
        lambda x: x[..., :3],
        lambda x: x.transpose(0, 1),
        lambda x: x.view(-1, 3),
        torch.clone,
        torch.detach,
        lambda x: x.mul_(2),
    ],
    ids=["first rows", "first features", "transposed", "other rows", "copied", "detached", "written to"],
)
def test_anything_else_is_kept_as_it_is_even_at_the_same_address(change: Callable[[Tensor], Tensor]) -> None:
    region, whole = enter(ReplicatedBorder(ALONE))
    assert region.call.find_kept(change(whole)) is None
