"""Two halves of a layer compute by turns, forward and backward, and what one of them meets ends both."""

import gc
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from framework.parallel.attention import select_sequences
from framework.parallel.experts.halves import HalvedForward, Turns

CPU = torch.device("cpu")


class Noted(torch.autograd.Function):
    """A step of a half, noted in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, note: Callable[[str], None], name: str) -> Tensor:
        ctx.note, ctx.name = note, name
        note(name)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:
        ctx.note(f"d{ctx.name}")
        return dx, None, None


def run_noted(ahead: int) -> list[str]:
    """Three turns of each half, and backward."""
    turns, events = Turns(CPU, ahead), []  # type: ignore[var-annotated]

    def compute(half: int) -> Tensor:
        x = torch.ones(1, requires_grad=True)
        for turn in range(3):
            # Different numbers of nodes: the halves' numbers would part if each counted by itself.
            for _ in range(1 + 7 * half):
                x = x * 1
            x = Noted.apply(x, events.append, f"{'ab'[half]}{turn}")
            if turn < 2:
                turns.end()
        return x

    first, second = turns.run(compute, [])
    (first + second).sum().backward()
    return events


@pytest.mark.parametrize(
    ("ahead", "expected"), [(0, "a0 b0 a1 b1 a2 b2"), (1, "a0 a1 b0 a2 b1 b2")], ids=["together", "ahead"]
)
def test_backward_takes_the_turns_of_forward_from_the_end(ahead: int, expected: str) -> None:
    events = run_noted(ahead)
    assert events[:6] == expected.split()
    assert events[6:] == [f"d{each}" for each in reversed(events[:6])]


def test_what_a_half_has_set_is_there_when_it_goes_on() -> None:
    turns, place = Turns(CPU), {"value": "whole"}

    def compute(half: int) -> list[str | None]:
        place["value"] = "ab"[half]
        turns.end()
        found = place.get("value")
        if half == 0:
            del place["value"]
        turns.end()
        return [found, place.get("value")]

    assert turns.run(compute, [(place, "value")]) == [["a", None], ["b", "b"]]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_one_half_is_the_layers(failing: int) -> None:
    turns, ended = Turns(CPU), []  # type: ignore[var-annotated]

    def compute(half: int) -> int:
        turns.end()
        if half == failing:
            raise ValueError(f"half {half}")
        turns.end()
        ended.append(half)
        return half

    with pytest.raises(ValueError, match=f"half {failing}"):
        turns.run(compute, [])
    assert ended == []
    failing = 2  # and the next layer computes as if nothing had been
    assert turns.run(compute, []) == [0, 1]


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_holds_nothing_of_what_was_computed(failing: int) -> None:
    turns, held = Turns(CPU), []  # type: ignore[var-annotated]

    def compute(half: int) -> None:
        x = torch.ones(3)
        held.append(ref(x))
        turns.end()
        if half == failing:
            raise ValueError

    gc.disable()
    try:
        with pytest.raises(ValueError):  # noqa: PT011
            turns.run(compute, [])
        assert [each() for each in held] == [None, None]
    finally:
        gc.enable()


def test_halves_are_a_layer_with_its_hooks_and_arguments() -> None:
    turns, packed = Turns(CPU), []  # type: ignore[var-annotated]
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 5, 4, requires_grad=True)
    positions, table = torch.arange(5).expand(3, 5), torch.randn(5, 4)

    def layer(hidden: Tensor, position_ids: Tensor, cos: Tensor, flag: bool) -> tuple[Tensor, None]:
        turns.end()
        assert flag
        assert len(position_ids) == len(hidden)
        return (hidden @ weight * cos).tanh() + position_ids.unsqueeze(-1), None

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    halved = HalvedForward(layer, turns, [], select_sequences)
    with saved_tensors_hooks(pack, lambda each: each):
        found, nothing = halved(x, position_ids=positions, cos=table, flag=True)
    # Of both halves: each keeps its input, the product and its tanh.
    assert len(packed) >= 6
    expected, _ = layer(x, positions, table, True)
    assert nothing is None
    assert torch.equal(found, expected)
    grads = [torch.autograd.grad(each.square().sum(), (x, weight)) for each in (found, expected)]
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        assert not halved(x, position_ids=positions, cos=table, flag=True)[0].requires_grad
    assert halved(x[:1], positions[:1], table, True)[0].shape == (1, 5, 4)


def test_rotations_of_as_many_sequences_as_tokens_are_halved_by_sequences() -> None:
    """llama4's are complex, [B, T, D]; positions along several axes are integers, [axes, B, T]."""
    seen: list[tuple[int, ...]] = []

    def layer(hidden: Tensor, rotations: Tensor, positions: Tensor) -> Tensor:
        seen.append((*rotations.shape, *positions.shape))
        return hidden

    rotations, positions = torch.ones(4, 4, 2, dtype=torch.complex64), torch.ones(3, 4, 4, dtype=torch.int64)
    HalvedForward(layer, Turns(CPU), [], select_sequences)(torch.ones(4, 4, 8), rotations, positions)
    assert seen == [(2, 4, 2, 3, 2, 4)] * 2
