"""Replicas: ranks that hold the same elements hold the same bits, in every step.

Nothing sends updated replicas around: each rank computes its own from gradients that a sum has made equal, bit by bit. A flipped
bit, a sum that was left out, a kernel that is not deterministic let them drift apart, and no loss shows it soon.
`train/replicas.py` compares hashes; `find_drift` names the parameters that differ. A hash is exact and takes one pass:

    h = sum_i w_i m_i  mod 2^64       w_i: the i-th word, at most 32 bits, as a signed integer
    m_i = 2 i + 1 + 2^34 r_i          r_i: scrambled bits of i

Whole numbers that wrap around add up alike in any order, so no reduction of a device makes it vary. What it cannot miss:

- a change within one word: w_i changes by d, 0 < |d| < 2^32, and d m_i is not 0, for m_i is odd.
- two different words in exchanged places, i and j: the sum changes by (w_i - w_j)(m_j - m_i). The first factor has at most 31
  factors of two, the second as many as 2 (j - i), at most 32 for places below 2^32; r_i lies beyond both.

Any other change goes unseen with a probability of about 2^-64: r_i leaves no pattern that cancels.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.comm.transfer import fetch
from framework.parallel.zero.buffers import UnitBuffer
from framework.parallel.zero.parameters import ParameterSync

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes of an element
ROW = 1 << 16  # words whose multipliers are kept
# Rows that are multiplied at once: in a core's cache on a CPU, enough for a kernel on a device (32 MiB of products).
ROWS_CPU, ROWS_DEVICE = 1, 64
SCRAMBLED_BITS = 34
ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)


class BitHash:
    """Hashes of tensors, each computed where it lives, for a rank on `device`. It keeps 512 KiB of multipliers on each device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._multipliers: dict[torch.device, Tensor] = {}

    def hash(self, pieces: Iterable[Tensor]) -> Tensor:
        """Hash flat tensors, [n] each of any dtype, one behind another: an int64 scalar on the rank's device. Waits only for
        pieces on the host of a rank whose device is another."""
        total, first = torch.zeros((), dtype=torch.int64, device=self._device), 0
        for piece in pieces:
            words = piece.detach().view(WORDS[piece.element_size()])
            block = ROW * (ROWS_CPU if words.device.type == "cpu" else ROWS_DEVICE)
            for start in range(0, len(words), block):
                total += fetch(self._hash_block(words[start : start + block], first + start), self._device)
            first += len(words)
        return total

    def _hash_block(self, words: Tensor, first: int) -> Tensor:
        """Hash words [n] from the place `first` on."""
        whole = len(words) // ROW * ROW
        rows, rest, multipliers = words[:whole].view(-1, ROW), words[whole:], self._multipliers_on(words.device)
        # The multipliers of a row are those of the first, and two more for each place between.
        starts = 2 * (first + ROW * torch.arange(len(rows), dtype=torch.int64, device=words.device))
        hashed = (rows * multipliers).sum() + (rows.sum(1, dtype=torch.int64) * starts).sum()
        if len(rest):
            hashed += (rest * multipliers[: len(rest)]).sum() + rest.sum(dtype=torch.int64) * 2 * (first + whole)
        return hashed

    def _multipliers_on(self, device: torch.device) -> Tensor:
        if device not in self._multipliers:
            places = torch.arange(ROW, dtype=torch.int64, device=device)
            scrambled = (places + 1) * ODD[0]
            # The shift keeps the sign, which only adds to the scrambling.
            scrambled = (scrambled ^ (scrambled >> 31)) * ODD[1]
            self._multipliers[device] = (scrambled >> SCRAMBLED_BITS << SCRAMBLED_BITS) + 2 * places + 1
        return self._multipliers[device]


@dataclass(frozen=True, eq=False)
class Hashed:
    """The hash of a state that is equal on all ranks of `axes`."""

    state: str
    """With `unit`, the words that name it to a user."""
    unit: str
    key: str
    """The same on all replicas, and no other's on this rank."""
    axes: tuple[Communicator, ...]
    hash: Tensor
    """An int64 scalar."""


def hash_parameters(parameters: ParameterSync, hashes: BitHash) -> Iterator[Hashed]:
    """Hashes of a stage's parameters that are unsharded for the whole step. Call it before the update: behind it they are old
    until the next unshard."""
    for index in sorted(parameters.unsharded):
        parameters.unshard(index)  # one that was prefetched may still be on its way
        for buffer in parameters.units[index]:
            plan = buffer.plan
            # Parameters gathered in fewer bits differ from their owner's; those in the master's own memory are hashed as that.
            is_alike = plan.lifetimes.resident_parameters and plan.dtypes.gathered is None
            if is_alike and (plan.has_master or not plan.is_whole):
                axes = (plan.axes.shard, plan.axes.update, *plan.axes.replicas)
                yield hash_buffer(buffer, "parameters", axes, hashes.hash([buffer.full[: plan.numel]]))


def hash_buffer(buffer: UnitBuffer, state: str, axes: Iterable[Communicator], value: Tensor) -> Hashed:
    """The hash of a state of a unit's buffer. value: an int64 scalar."""
    return Hashed(state, buffer.unit, buffer.slots[0].name, tuple(axes), value)


def find_differing(hashed: Iterable[Hashed]) -> list[tuple[Hashed, Communicator]]:
    """The hashes that are not equal on all ranks of one of their axes, each with that axis: the same on all of its ranks.
    Collective over the axes: an all-reduce of 16 bytes a hash over each."""
    by_axis: dict[Communicator, list[Hashed]] = {}
    for each in hashed:
        for axis in (axis for axis in each.axes if axis.size > 1):
            by_axis.setdefault(axis, []).append(each)
    found = []
    # In one order on all ranks: stages of a pipeline may meet the axes in different ones.
    for axis, on_axis in sorted(by_axis.items(), key=lambda each: each[0].name):
        on_axis.sort(key=lambda each: (each.key, each.state))  # nor do they meet what they share in one order
        mine = torch.stack([each.hash for each in on_axis])
        # The largest and the smallest in one message: ~x falls where x rises, and unlike -x it has no overflow.
        largest = torch.cat([mine, ~mine])
        all_reduce(largest, axis, "max", "hashes of replicas")
        differs = (largest[: len(mine)] != ~largest[len(mine) :]).tolist()
        found += [(each, axis) for each, is_different in zip(on_axis, differs, strict=True) if is_different]
    return found


def find_drift(buffers: Sequence[UnitBuffer], hashes: BitHash) -> list[str]:
    """Parameters of which ranks hold different masters that should be equal, as `name over axis`: the same list on all ranks of
    that axis. Collective, as `find_differing` is."""
    hashed = []
    for buffer in (buffer for buffer in buffers if any(axis.size > 1 for axis in buffer.plan.axes.replicas)):
        # The master and not what forward reads: a drift below bf16's precision would show there only after many steps.
        with buffer.master_in_memory() as master:
            for slot in buffer.slots:
                value = hashes.hash([buffer.held(slot, master)[1]])
                hashed.append(Hashed("master", buffer.unit, slot.name, buffer.plan.axes.replicas, value))
    return [f"{each.key} over {axis.name}" for each, axis in find_differing(hashed)]
