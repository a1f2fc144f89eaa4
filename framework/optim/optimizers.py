"""FlatOptimizer: groups of shards in, one update in place, with the norm of the global gradient, what clipping divides by, and
the gradient noise scale, which follows from norms.

The clipping divisor and the skip flag go into the kernel, so that clipping costs no pass over memory and a step with
infinite or NaN gradients is skipped without asking the device.

The noise scale is the batch, in tokens, whose gradient is half noise (McCandlish et al. 2018, section 2.2).

    B_noise = B noise / signal                  noise: trace of the covariance of a batch's gradient g; signal: |E g|^2

    A = sum_k w_k |g_k|^2                       expected: signal + noise
    M = |sum_k w_k g_k|^2                       expected: signal + kappa noise,     kappa = sum_k w_k^2

    noise = (A - M) / (1 - kappa)               signal = (M - kappa A) / (1 - kappa)

w_k are the weights of the last gradients in AdamW's first moment, with its bias corrected. So M is the norm of a state that is
there anyway, A follows from norms that the run has read anyway, and the layout does not matter: a step's microbatches are not
looked at one by one. It assumes that E g changes little within 1 / (1 - beta) steps.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from framework.optim.groups import decay_rate, optimizer_of
from framework.optim.states import Masters, MomentsDtype, StateKind, make_states
from framework.optim.update_rules import OPTIMIZERS, FlatShard, ShardGroup
from framework.recipe.schema import Optim


@dataclass(frozen=True)
class Missed:
    """Elements [start, stop) of a shard that this rank's backward did not reach. is_reached: by another's; on the device."""

    shard: FlatShard
    start: int
    stop: int
    is_reached: Tensor


def state_names(optim: Optim, group: str = "") -> tuple[str, ...]:
    """The per-element states, which a checkpoint keeps, of parameters of the group with this key."""
    return tuple(OPTIMIZERS[optimizer_of(optim, group)].states(optim))


def scale_decay(optim: Optim, decay: float, lr: float) -> float:
    """A weight decay for a kernel that multiplies it by `lr`. No step has the rate 0: see recipe/method_rules.py."""
    return decay * (decay_rate(optim, lr) / lr) if decay_rate(optim, lr) != lr else decay


class FlatOptimizer:
    """One of the recipe's optimizers over flat shards.

    name: of the update rule; moments: `precision.moments`; seed: of stochastic rounding, of moments and of values in bf16.
    """

    def __init__(
        self,
        name: str,
        optim: Optim,
        groups: Sequence[ShardGroup],
        device: torch.device,
        moments: MomentsDtype = "fp32",
        seed: int = 0,
    ):
        self._rule, self._optim = OPTIMIZERS[name], optim
        # A rank whose stages are frozen, or all on the host, counts updates as the others do. fp64: its kernel reads no divisor.
        nothing = FlatShard((), *torch.zeros(2, 0, dtype=torch.float64, device=device))
        filled = [group for group in groups if group.shards] or [ShardGroup("nothing", (nothing,), 1.0, 0.0)]
        self.shards = tuple(shard for group in groups for shard in group.shards)
        self._group_of = {shard: group for group in filled for shard in group.shards}
        self._kernel_divides = all(shard.gradient.dtype == torch.float32 for shard in self._group_of)
        kinds = [
            StateKind(name, name not in self._rule.nonnegative, retained)
            for name, retained in self._rule.states(optim).items()
        ]
        self.states = make_states(moments, kinds, tuple(self._group_of), device, seed)
        self._masters = Masters(self.states.chunks, device, seed)
        self._kernels = [self._make_kernel(optim, number, device) for number in range(len(self.states.chunks))]

    def _make_kernel(self, optim: Optim, number: int, device: torch.device) -> torch.optim.Optimizer:
        """torch's optimizer over the values, gradients and states of the chunk with this number."""
        chunk = self.states.chunks[number]
        # One call for all shards of a group: each call of a fused kernel costs the host as much as four layers' norms.
        by_group: dict[ShardGroup, list[Tensor]] = {}
        states: dict[Tensor, dict[str, Tensor]] = {}
        for run, value in zip(chunk.runs, self._masters.views(number), strict=True):
            value.grad = run.shard.gradient[run.start : run.stop]
            by_group.setdefault(self._group_of[run.shard], []).append(value)
            states[value] = self.states.views(chunk, run)
            if self._rule.counts_updates:
                states[value]["step"] = torch.zeros((), dtype=torch.float32, device=device)
        settings = [
            {"params": values, "decay": group.weight_decay, "lr_ratio": group.lr_ratio}
            for group, values in by_group.items()
        ]
        kernel = self._rule.make(optim, settings)
        kernel.state.update(states)
        return kernel

    def step(self, lr: float, divisor: Tensor, skip: Tensor, step: int) -> None:
        """Divide the gradients by `divisor` and update at learning rate `lr`; no effect where `skip` (scalar) is 1. step: of the
        run, for which random bits are drawn."""
        if not self._kernel_divides:  # the kernels read their divisor as fp32, which would round fp64 gradients
            torch._foreach_div_([shard.gradient for shard in self._group_of], divisor)
        found_inf, grad_scale = skip.float(), divisor.float()
        for number, (chunk, kernel) in enumerate(zip(self.states.chunks, self._kernels, strict=True)):
            self._masters.load(number)
            self.states.load(chunk)
            for settings in kernel.param_groups:
                settings["lr"] = lr * settings["lr_ratio"]
                settings["weight_decay"] = scale_decay(self._optim, settings["decay"], lr)
            if self._kernel_divides:
                kernel.grad_scale = grad_scale  # type: ignore[attr-defined]
            kernel.found_inf = found_inf  # type: ignore[attr-defined]
            kernel.step()
            # A skipped step has left the states as they were decoded: all of them are numbers that rounding leaves alone.
            self.states.store(chunk, step)
            self._masters.store(number, step)

    def state(self, shard: FlatShard, name: str) -> Tensor:
        """A per-element state of a shard as a checkpoint keeps it, [n]: in the master's dtype, or a copy of fewer bits in bf16.
        Written to between `states.open` and `states.close` only."""
        return self.states.values(shard, name)

    @property
    def num_updates(self) -> int:
        """Updates done so far, skipped ones not counted: Adam's bias correction depends on it."""
        return max((int(count) for count in self._counts()), default=0)

    @num_updates.setter
    def num_updates(self, count: int) -> None:
        for each in self._counts():
            each.fill_(count)

    def _counts(self) -> Iterator[Tensor]:
        return (state["step"] for kernel in self._kernels for state in kernel.state.values() if "step" in state)

    def preserving(self, missed: Sequence[Missed]) -> AbstractContextManager[None]:
        """Leave elements that no rank has reached, and their states, as they are."""
        return preserving(
            [
                (view, each.is_reached)
                for each in missed
                for view in (
                    each.shard.value[each.start : each.stop],
                    *self.states.memory(each.shard, each.start, each.stop),
                )
            ]
        )


@contextmanager
def preserving(views: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Leave views as they are where the flag beside them is 0. The device decides: no host waits."""
    saved = [view.clone() for view, _ in views]
    yield
    for (view, is_reached), old in zip(views, saved, strict=True):
        torch.where(is_reached, view, old, out=view)


# torch.nn.utils.clip_grad_norm_ adds this to the norm; kept so that clipping is the same to the last digits.
CLIP_EPSILON = 1e-6
# Elements whose squares are added in the gradient's dtype; such sums are added in fp64. On CPUs torch adds a long vector with a
# few running sums: of 4M fp32 elements the square of the norm was off by 6e-5, and in rows of 4,096 by 3e-9, in the same time.
ROW = 4096


def norm_rows(owned: Iterable[Tensor]) -> list[Tensor]:
    """The rows of the tensors that this rank owns, for `squared_norm`: views, [rows, ROW] of each and [1, n] of its rest."""
    return [rows for each in owned for rows in _rows_of(each.view(-1))]


def squared_norm(rows: Sequence[Tensor], device: torch.device) -> Tensor:
    """Sum of squares over what this rank owns, fp64 scalar; summed over the world it is the global gradient's.

    rows: of the gradients, as `norm_rows` gives them. Law 2: owned intervals partition every parameter, so nothing is counted
    twice and no axis is special.
    """
    norms = [torch.linalg.vector_norm(each, dim=1) for each in rows]
    return torch.cat(norms).double().square().sum() if norms else torch.zeros((), dtype=torch.float64, device=device)


def _rows_of(flat: Tensor) -> Iterator[Tensor]:
    whole = flat.numel() // ROW * ROW
    if whole:
        yield flat[:whole].view(-1, ROW)
    if whole < flat.numel():
        yield flat[whole:].view(1, -1)


def clip_divisor(norm: Tensor, clip_norm: float | None) -> Tensor:
    """max(1, norm / clip_norm), fp64 scalar: gradients divided by it have at most the norm `clip_norm`."""
    if clip_norm is None:
        return torch.ones_like(norm)
    return ((norm + CLIP_EPSILON) / clip_norm).clamp(min=1.0)


# AdamW's state that is a mean of gradients.
FIRST_MOMENT = "exp_avg"


def average_squares(former: float | None, norm: float, beta: float, updates: int) -> float:
    """The moving average of squared norms after one more update, its bias not corrected, as the first moment's. former: after
    `updates` of them; None: not known, as where a run had none yet: all were as this one."""
    former = (1 - beta**updates) * norm * norm if former is None else former
    return beta * former + (1 - beta) * norm * norm


def estimate_noise_scale(squared_norms: float, squared_moment: float, beta: float, updates: int) -> float | None:
    """B_noise / B. squared_norms: of `average_squares`, of gradients as the optimizer has seen them, clipped; squared_moment:
    squared norm of the first moment after `updates` updates, its bias not corrected; beta: its decay. None before there are two
    gradients, and where the noise hides the signal."""
    if updates < 2:
        return None
    known = 1 - beta**updates
    mean, squared_mean = squared_norms / known, squared_moment / known**2
    kappa = (1 - beta) / (1 + beta) * (1 - beta ** (2 * updates)) / known**2
    noise, signal = mean - squared_mean, squared_mean - kappa * mean
    return noise / signal if noise >= 0 and signal > 0 else None
