"""State-space mixers under tensor parallelism: heads of Mamba-2, channels of Mamba-1, divided as attention's heads are.

    Mamba-2    in_proj -> z | x | B | C | dt, conv1d over x | B | C, scan, gated norm, out_proj
    Mamba-1    in_proj -> x | z, conv1d over x, x_proj -> dt | B | C of all channels, dt_proj, scan, out_proj

Heads lie in groups, each with a B and a C of its own. Groups divide over `tp`, or there are fewer of them than ranks. Then each
rank has the rows of `in_proj` for all B, C and dt, which stand at its end and are counted and summed as shared key-value heads
are; it goes on with those of its group and heads. The convolution's rows for B and C have their gradient summed, a few numbers.
The gated norm's mean square over a group on several ranks is one sum over `tp`.

The family's forward stays: it reads numbers of heads, which are divided, and weights, some of which are lent for a call.

    B sequences, T tokens, D features of this rank, G groups of the mixer
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framework.comm import duals
from framework.comm.communicator import Communicator
from framework.mesh.layout import part
from framework.model.precision import sums_dtype
from framework.parallel.tensor.layers import ColumnLinear, RowLinear
from framework.parallel.tensor.partition import Counts
from framework.parallel.tensor.regions import Region, lend, take_back


def divide_mixer(mixer: Any, counts: Counts, tp: Communicator) -> None:
    """Have a mixer of heads, whose weights are still whole, compute with those of this rank."""
    whole = counts.linear["state_rows"]
    own = find_own_rows(counts, tp)
    lent: dict[tuple[nn.Module, str], Callable[[Tensor], Tensor]] = {
        (mixer, name): partial(_select, sizes=whole, own=own)
        for name, each in mixer.named_buffers(recurse=False)
        if each.shape[-1] == sum(whole)
    }
    mixer.num_heads, mixer.intermediate_size = whole[4] // tp.size, whole[0] // tp.size
    mixer.n_groups = max(mixer.n_groups // tp.size, 1)
    mixer.conv_dim = mixer.intermediate_size + 2 * mixer.n_groups * mixer.ssm_state_size
    if counts.count_whole("state_channels", tp.size):
        share = partial(_share_channels, sizes=(mixer.intermediate_size, *whole[2:4]), own=own[2:4], tp=tp)
        lent |= {(mixer.conv1d, name): share for name, _ in mixer.conv1d.named_parameters()}
    if lent:
        mixer.register_forward_pre_hook(partial(lend, lent))
        mixer.register_forward_hook(partial(take_back, lent))


def find_own_rows(counts: Counts, tp: Communicator) -> list[slice]:
    """This rank's rows of each segment of a packed weight: z, x, B, C, dt. Ranks of one group have the same B and C."""
    inner, _, states, _, heads = counts.linear["state_rows"]
    divided = part(inner, tp.rank, tp.size)
    pieces = min(counts.kv, tp.size)
    of_group = part(states, tp.rank * pieces // tp.size, pieces)
    return [slice(*each) for each in (divided, divided, of_group, of_group, part(heads, tp.rank, tp.size))]


def _select(x: Tensor, sizes: Sequence[int], own: Sequence[slice], dim: int = -1) -> Tensor:
    """Some of the indices of each segment of x along a dim."""
    segments = zip(x.split(list(sizes), dim), own, strict=True)
    return torch.cat([each.narrow(dim, one.start, one.stop - one.start) for each, one in segments], dim)


def _share_channels(x: Tensor, sizes: Sequence[int], own: Sequence[slice], tp: Communicator) -> Tensor:
    """This rank's rows of a convolution's parameter: of those for all B and C, which all ranks have, the ones of its group."""
    divided, shared = x.split([sizes[0], sum(sizes[1:])])
    return torch.cat([divided, _select(duals.copy_to(shared, tp), sizes[1:], own, dim=0)])


class StateColumn(ColumnLinear):
    """x: [B, T, K] -> [B, T, z | x | B | C | dt], of this rank's heads and their group, whose B, C and dt all ranks compute."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, region: Region, tp: Communicator, counts: Counts
    ) -> None:
        inner, _, *shared = counts.linear["state_rows"]
        super().__init__(weight, bias, False, region, tp, sum(shared))
        self.sizes = (inner // tp.size, inner // tp.size, *shared)
        self.own = [slice(0, self.sizes[0])] * 2 + find_own_rows(counts, tp)[2:]

    def forward(self, x: Tensor) -> Tensor:
        return _select(super().forward(x), self.sizes, self.own)


class SummedRowLinear(RowLinear):
    """A row layer within a region: x: [..., K_r] -> [..., N], the sum over `tp`, of which each rank makes its own use."""

    def forward(self, x: Tensor) -> Tensor:
        return duals.copy_to(duals.reduce_from(super().forward(x), self.region.axis), self.region.axis)


class SplitGatedNorm(nn.Module):
    """A gated RMS norm over groups of features, each on several ranks: x, gate: [B, T, D] -> [B, T, D].

        u = x silu(gate)        y = u / sqrt(mean of u^2 over the group + eps) * w        or the gate behind the norm

    weight: w, [D]; groups: G, on all ranks. Sends G numbers per token, forward and backward.
    """

    def __init__(self, norm: Any, weight: nn.Parameter, groups: int, axis: Communicator) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = weight, norm.variance_epsilon
        self.is_gated_last = getattr(norm, "norm_before_gate", False)
        self.groups, self.axis = groups, axis

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        x = hidden_states.to(sums_dtype(hidden_states.dtype))
        factor = F.silu(gate.to(x.dtype))
        x = x if self.is_gated_last else x * factor
        # A place for each group: ranks of the others fill theirs.
        group, ranks = self.groups * self.axis.rank // self.axis.size, self.axis.size // self.groups
        sums = F.pad(x.square().sum(-1, keepdim=True), (group, self.groups - 1 - group))
        total = duals.copy_to(duals.reduce_from(sums, self.axis), self.axis)[..., group : group + 1]
        x = self.weight * (x * torch.rsqrt(total / (ranks * x.shape[-1]) + self.variance_epsilon))
        return (x * factor if self.is_gated_last else x).to(hidden_states.dtype)


def split_gated_norm(norm: Any, weight: nn.Parameter, groups: int, axis: Communicator) -> nn.Module:
    """The norm with this rank's weight: itself where it has whole groups."""
    if groups % axis.size:
        return SplitGatedNorm(norm, weight, groups, axis)
    norm.weight = weight
    if hasattr(norm, "n_groups"):
        norm.n_groups = groups // axis.size
    return norm
