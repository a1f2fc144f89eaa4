"""Shared experts may be computed at another time where the mixture's own code cannot tell."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from framework.model.experts import find_experts
from framework.model.load import build_meta
from framework.parallel.experts.dispatch import SharedExperts, stand_in
from tests.families import build_config, family

Forward = Callable[[nn.Module, Tensor], Tensor]


class Shared(nn.Module):
    """x^2 / 2."""

    def forward(self, x: Tensor) -> Tensor:
        return x.square() / 2


class Routed(nn.Module):
    """3 x, and meanwhile the shared experts."""

    shared: SharedExperts | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.shared is not None:
            self.shared.compute_ahead()
        return 3 * x


def mixture_of(forward: Forward) -> nn.Module:
    """A mixture with this forward: its experts are `routed`, its shared ones `shared_expert`."""
    mixture = type("Mixture", (nn.Module,), {"forward": forward})()
    mixture.routed, mixture.shared_expert = Routed(), Shared()
    return mixture


def ask_in_front(mixture: nn.Module, x: Tensor) -> Tensor:
    rows = x.view(-1, x.shape[-1])
    shared = mixture.shared_expert(rows)
    return (mixture.routed(rows) + shared).view_as(x)


def ask_behind(mixture: nn.Module, x: Tensor) -> Tensor:
    return mixture.routed(x) + mixture.shared_expert(x)


def flatten_and_ask_behind(mixture: nn.Module, x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    routed = mixture.routed(rows)
    return mixture.shared_expert(rows).add_(routed).view_as(x)  # in place, as llama4 does


def ask_of_others_behind(mixture: nn.Module, x: Tensor) -> Tensor:
    return mixture.routed(x) + mixture.shared_expert(x[:, 1:])


def ask_twice(mixture: nn.Module, x: Tensor) -> Tensor:
    return mixture.shared_expert(x) + mixture.routed(x) + mixture.shared_expert(x)


@pytest.mark.parametrize(
    ("forward", "may"),
    [
        (ask_in_front, False),
        (ask_behind, True),
        (flatten_and_ask_behind, True),
        (ask_of_others_behind, False),
        (ask_twice, False),
    ],
)
def test_the_order_of_a_mixtures_code_decides_whether_they_may_be_computed_ahead(forward: Forward, may: bool) -> None:
    assert (stand_in(mixture_of(forward), "routed", 4) is not None) == may


@pytest.mark.parametrize(
    ("name", "may"), [("qwen2_moe", False), ("qwen3_next", False), ("deepseek_v3", True), ("llama4_text", True)]
)
def test_the_order_is_that_of_the_familys_code(name: str, may: bool) -> None:
    model = build_meta(build_config(family(name)))
    path, _, _ = next(find_experts(model))
    parent, _, child = path.rpartition(".")
    assert (stand_in(model.get_submodule(parent), child, 32) is not None) == may


@pytest.mark.parametrize("forward", [ask_behind, flatten_and_ask_behind])
def test_the_result_is_bitwise_the_same_in_forward_and_backward(forward: Forward) -> None:
    x = torch.randn(2, 3, 4, requires_grad=True)
    stock = mixture_of(forward)(x)
    (expected,) = torch.autograd.grad(stock.sin().sum(), x)
    mixture = mixture_of(forward)
    mixture.routed.shared = stand_in(mixture, "routed", 4)
    found = mixture(x)
    (gradient,) = torch.autograd.grad(found.sin().sum(), x)
    assert torch.equal(found, stock)
    assert torch.equal(gradient, expected)
    with torch.no_grad():
        assert torch.equal(mixture(x), stock)
