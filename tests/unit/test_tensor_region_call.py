"""A layer keeps a part of the region's input for backward only where a second gather brings back what it has seen."""

from collections.abc import Callable
from functools import partial
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from framework.comm.communicator import Communicator
from framework.mesh.token_layout import TokenLayout
from framework.mesh.topology import Axis
from framework.parallel.tensor.async_tp import AsyncGather, AsyncGatherTensor
from framework.parallel.tensor.borders import Border, ShardedBorder
from framework.parallel.tensor.regions import Region, lend, take_back

ALONE = Communicator(Axis("tp", 1, 0))


class GatheringBorder(ShardedBorder):
    """Sequence parallelism of one rank: what it joins of the ranks' tokens is a view."""

    def __init__(self, axis: Communicator) -> None:
        super().__init__(TokenLayout(2, 4, axis.axis, is_sharded=True), axis)


class LateBorder(Border):
    """Hands out what has a shape and no memory, as async TP does."""

    def enter(self, x: Tensor) -> Tensor:
        return AsyncGatherTensor(AsyncGather(x, x.shape[-2], ALONE), x)


def enter(border: Border) -> tuple[Region, Tensor]:
    region = Region(border, regathers=True)
    return region, region.enter(torch.randn(2, 4, 6, requires_grad=True))


@pytest.mark.parametrize("border", [Border, GatheringBorder, LateBorder])
def test_the_input_itself_and_its_rows_in_another_shape_are_brought_back(
    border: Callable[[Communicator], Border],
) -> None:
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
    for border in (Border(ALONE), GatheringBorder(ALONE)):
        region, whole = enter(border)
        assert region.call.find_kept(change(whole)) is None


def test_a_region_whose_recomputation_ends_early_keeps_no_input() -> None:
    """Behind the last tensor that backward needs it is stopped, here in front of the region's end."""
    region, inputs = Region(Border(ALONE), regathers=True), []
    weight = torch.randn(6, 6, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        whole = region.enter(x)
        inputs.append(ref(whole))
        return x + region.leave(whole @ weight)

    x = torch.randn(2, 4, 6, requires_grad=True)
    checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert region.call.kept is not None, "the recomputation has gone to the region's end"
    assert [each() for each in inputs] == [None, None]


def test_a_weight_that_recomputation_has_not_taken_back_is_lent_whole_again() -> None:
    """Recomputation ends with the last tensor that backward needs, within the module: hooks behind it are not called."""
    module = torch.nn.Linear(3, 2, dtype=torch.float64)
    lent = {(module, "bias"): partial(torch.div, other=2)}
    module.register_forward_pre_hook(partial(lend, lent))
    module.register_forward_hook(partial(take_back, lent))
    kept = module.bias
    for _ in range(2):
        x = torch.randn(4, 3, dtype=torch.float64)
        y = checkpoint(lambda x: module(x).sin().sin(), x, use_reentrant=False)
        torch.testing.assert_close(y, (x @ module.weight.t() + kept / 2).sin().sin())
        y.sum().backward()
        lend(lent, module, ())  # what a recomputation that has ended early leaves
    assert torch.autograd.grad(module(x).sum(), kept)[0].tolist() == [2, 2]
