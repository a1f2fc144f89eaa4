"""Stochastic rounding: right on average, exact where bf16 is, and a function of the element alone."""

import torch
from torch import Tensor

from framework.mesh.layout import Layout, Shard
from framework.model.counter_rng import CounterRng
from framework.model.initial import rows_of
from framework.optim.stochastic_rounding import draw_bits, round_to_bf16

CPU = torch.device("cpu")
KEY = (7, "moments", 3, "w")


def bits_of(layout: Layout, size: int = 64) -> Tensor:
    out = torch.empty(layout.numel_owned, dtype=torch.int32)
    draw_bits(CounterRng(size, CPU), KEY, rows_of(layout.boxes(), layout.shape), out)
    return out


def test_the_mean_of_many_roundings_is_the_value() -> None:
    values = torch.randn(50) * torch.logspace(-30, 3, 50)
    rounds = 4096
    bits = bits_of(Layout((rounds, 50)), size=1 << 15).view(rounds, 50)
    rounded = torch.stack([round_to_bf16(values, each) for each in bits]).double()
    spacing = (values.bfloat16().abs().double() * 2.0**-7).clamp(min=1e-300)
    # A rounding is off by at most one spacing, with a standard deviation of at most half of it.
    assert ((rounded - values.double()).abs() <= spacing).all()
    assert ((rounded.mean(0) - values.double()).abs() < 4.5 * 0.5 / rounds**0.5 * spacing).all()
    assert (rounded != values.bfloat16()).any(), "to nearest, it would not be right on average"


def test_what_bf16_has_stays() -> None:
    values = torch.cat([torch.randn(100).bfloat16().float(), torch.tensor([0.0, -0.0, 2.0**-133])])
    for each in (0, -1, 0xFFFF):
        assert torch.equal(round_to_bf16(values, torch.full((103,), each, dtype=torch.int32)).float(), values)


def test_bits_belong_to_the_element() -> None:
    whole = bits_of(Layout((6, 10))).view(6, 10)
    for dim, index in ((0, 1), (1, 0), (1, 1)):
        layout = Layout((6, 10), (Shard("tp", dim, index, 2),), interval=(3, 27))
        expected = torch.cat([whole[box.slices()].flatten() for box in layout.boxes()])
        assert torch.equal(bits_of(layout, size=7), expected)
