"""Shared experts may be computed at another time where the mixture's own code cannot tell."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from framework.model.experts import find_experts
from framework.model.load import build_meta
from framework.parallel.experts.shared import LateSharedExperts, SharedExperts, stand_in
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


def read_between(mixture: nn.Module, x: Tensor) -> Tensor:
    shared = mixture.shared_expert(x).relu()
    return mixture.routed(x) + shared


def view_between(mixture: nn.Module, x: Tensor) -> Tensor:
    shared = mixture.shared_expert(x)[..., None]
    return mixture.routed(x) + shared[..., 0]


def write_between(mixture: nn.Module, x: Tensor) -> Tensor:
    shared = mixture.shared_expert(x)
    x *= 2
    return mixture.routed(x) + shared


def ask_twice(mixture: nn.Module, x: Tensor) -> Tensor:
    return mixture.shared_expert(x) + mixture.routed(x) + mixture.shared_expert(x)


@pytest.mark.parametrize(
    ("forward", "kind"),
    [
        (ask_in_front, LateSharedExperts),
        (ask_behind, SharedExperts),
        (flatten_and_ask_behind, SharedExperts),
        (ask_of_others_behind, None),
        (read_between, None),
        (view_between, None),
        (write_between, None),
        (ask_twice, None),
    ],
)
def test_what_a_mixture_does_decides_when_they_may_be_computed(forward: Forward, kind: type | None) -> None:
    shared = stand_in(mixture_of(forward), "routed", 4)
    assert (None if shared is None else type(shared)) is kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen2_moe", LateSharedExperts),
        ("qwen3_next", LateSharedExperts),
        ("deepseek_v3", SharedExperts),
        ("llama4_text", SharedExperts),
    ],
)
def test_the_order_is_that_of_the_familys_code(name: str, kind: type) -> None:
    model = build_meta(build_config(family(name)))
    path, _, _ = next(find_experts(model))
    parent, _, child = path.rpartition(".")
    assert type(stand_in(model.get_submodule(parent), child, 32)) is kind


@pytest.mark.parametrize("forward", [ask_in_front, ask_behind, flatten_and_ask_behind])
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


def test_a_promise_takes_no_memory_and_is_kept_without_a_copy() -> None:
    results: list[Tensor] = []

    class Told(Shared):
        def forward(self, x: Tensor) -> Tensor:
            results.append(super().forward(x))
            return results[-1]

    shared = LateSharedExperts(Told(), "shared_expert")
    promise = shared(torch.randn(5, 4, requires_grad=True))
    assert promise.shape == (5, 4)
    assert promise.untyped_storage().nbytes() == 4
    shared.compute_ahead()
    assert promise.data_ptr() == results[0].data_ptr()
    assert promise.requires_grad


def test_a_promise_that_nobody_keeps_is_no_result() -> None:
    mixture = mixture_of(ask_in_front)
    mixture.routed.shared = stand_in(mixture, "routed", 4)
    mixture.routed.shared = None  # experts that forget what is to be computed meanwhile
    with pytest.raises(AssertionError, match="shared_expert was asked for, and no routed expert was"):
        mixture(torch.randn(1, 2, 4))


def test_an_input_that_changes_before_it_is_read_is_told() -> None:
    shared, x = LateSharedExperts(Shared(), "shared_expert"), torch.randn(2, 4)
    shared(x)
    x.zero_()
    with pytest.raises(AssertionError, match="the input of shared_expert has changed"):
        shared.compute_ahead()
