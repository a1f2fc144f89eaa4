"""Hashes of bits: any flipped bit and any two exchanged values change them, and how the tensor is cut into pieces and blocks does
not make them vary between ranks."""

import pytest
import torch
from torch import Tensor

from framework.parallel.zero.replicas import ROW, BitHash
from framework.train.replicas import Difference, Witness, describe

CPU = torch.device("cpu")
HASHES = BitHash(CPU)
WRAP = 1 << 64


def hash_of(*pieces: Tensor) -> int:
    return int(HASHES.hash(pieces))


def define(words: list[int]) -> int:
    """The sum as the docstring has it, in Python's numbers."""
    multipliers = HASHES._multipliers_on(CPU).tolist()
    total = sum(word * (multipliers[i % ROW] + 2 * (i - i % ROW)) for i, word in enumerate(words)) % WRAP
    return total - WRAP if total >= WRAP // 2 else total


def values(numel: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("numel", [0, 1, 1000, ROW, 2 * ROW + 17])
def test_it_is_the_sum_that_is_proved(numel: int) -> None:
    assert hash_of(values(numel)) == define(values(numel).view(torch.int32).tolist())


def test_the_low_bits_of_a_multiplier_are_its_place() -> None:
    """What the proof rests on: odd, and distinct below the scrambled bits."""
    low = HASHES._multipliers_on(CPU) & ((1 << 34) - 1)
    assert torch.equal(low, 2 * torch.arange(ROW) + 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_every_flipped_bit_changes_it(dtype: torch.dtype) -> None:
    x = values(40).mul(50).to(dtype)
    before, bits = hash_of(x), x.view(torch.uint8)
    for byte in range(len(bits)):
        for bit in range(8):
            bits[byte] ^= 1 << bit
            assert hash_of(x) != before
            bits[byte] ^= 1 << bit
    assert hash_of(x) == before


@pytest.mark.parametrize("distance", [1, 2, 64, 1 << 15, ROW, 2 * ROW])
def test_exchanged_values_change_it_even_if_only_their_sign_differs(distance: int) -> None:
    x = torch.ones(2 * ROW + 5)
    x[3] = -1.0
    other = x.clone()
    other[3], other[3 + distance] = x[3 + distance], x[3]
    assert hash_of(x) != hash_of(other)


def test_pieces_are_hashed_one_behind_another() -> None:
    x = values(300)
    assert hash_of(x[:100], x[100:]) != hash_of(x[100:], x[:100])
    assert hash_of(x[:0], x) == hash_of(x)


# --- who is named


def witness(rank: int, *differences: tuple[str, tuple[int, ...], int]) -> Witness:
    told = tuple(Difference("master", f"layers.{key}", key, ranks, value) for key, ranks, value in differences)
    return Witness(f"rank {rank}", told)


def test_the_majority_names_who_is_wrong() -> None:
    lines = describe([witness(rank, ("0", (0, 1, 2), 9 if rank == 1 else 5)) for rank in range(3)])
    assert lines == ["master of layers.0: rank 1 differs from 2 others, which are equal"]


def test_two_name_both() -> None:
    (line,) = describe([witness(0, ("0", (0, 1), 5)), witness(1, ("0", (0, 1), 6))])
    assert line == "master of layers.0: rank 0 and rank 1 differ, and no majority tells which is wrong"


def test_two_axes_of_two_ranks_make_a_majority() -> None:
    """Rank 1 differs from rank 0 over one axis and from rank 3 over the other; rank 2 has heard nothing."""
    witnesses = [
        witness(0, ("0", (0, 1), 5)),
        witness(1, ("0", (0, 1), 6), ("0", (1, 3), 6)),
        witness(2),
        witness(3, ("0", (1, 3), 5)),
    ]
    assert describe(witnesses) == ["master of layers.0: rank 1 differs from 2 others, which are equal"]


def test_groups_that_no_axis_joins_are_told_apart() -> None:
    """Slices of tensor parallelism have other values, and here both of them drifted."""
    witnesses = [witness(rank, ("0", (rank % 2, rank % 2 + 2), rank)) for rank in range(4)]
    assert [line.count("rank") for line in describe(witnesses)] == [2, 2]
