"""The oracle's Lion, and the noise by which it knows signs that rounding decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# Ranks sum in another order than one process, which changes a gradient differently than perturbed weights do: by at most so many
# times as much. Over six random layouts the most were 15 times in fp32, 1.3 in fp64 and 1.02 in bf16.
NOISE_FACTORS = {torch.float64: 30.0, torch.float32: 30.0, torch.bfloat16: 4.0, torch.float16: 4.0}
# Shares of lr by which a layout's weight may miss what a sign of -1, 0 or 1 leads to.
LEGAL = 0.1


@dataclass(frozen=True)
class Noise:
    """Effect of rounding on one parameter's gradient, measured on the oracle: its gradient again, from weights that are rounded
    differently."""

    # The largest change of an element.
    size: float
    # Bool, of the gradient's shape: False in rows of a matrix whose gradient is exactly zero however it is rounded (a token that
    # does not occur).
    is_live: Tensor


def measure_noise(gradient: Tensor, perturbed: Sequence[Tensor], dtype: torch.dtype) -> Noise:
    """The noise of a gradient. perturbed: the same gradient, rounded differently; dtype: that of forward and backward."""
    size = max(float((each - gradient).abs().max()) for each in perturbed) if gradient.numel() else 0.0
    return Noise(NOISE_FACTORS[dtype] * size, torch.stack([_find_live(each) for each in (gradient, *perturbed)]).any(0))


def _find_live(gradient: Tensor) -> Tensor:
    is_live = gradient != 0
    if gradient.ndim < 2:
        # A vector has no rows. An element of it may be zero because its terms cancel (a key's bias, in sequences of two tokens),
        # and ranks that add them in another order do not find zero.
        return is_live.any().expand_as(gradient)
    return is_live.flatten(1).any(1).view(-1, *[1] * (gradient.ndim - 1))


class PlainLion(torch.optim.Optimizer):
    """Lion as its paper's algorithm 2 states it, one parameter at a time: torch has none to compare with.

    Lion updates by sign(d), d = beta1 m + (1 - beta1) g. Where d is zero up to rounding, plus and minus are equally right, and
    two correct runs diverge: weights by 2 lr, then the next step's loss and gradients. For those elements the oracle takes the
    layout's sign, if the layout's weight is one that Lion can produce; else it keeps its own, and the difference shows. So
    every weight is compared, and both sides remain one training run.

    State of a parameter: `m`; `noise`, the largest part of m that is rounding; `undecided`, bool, where rounding decided a sign.
    """

    @torch.no_grad()
    def step(self, closure=None) -> None:  # type: ignore[override]
        """Make one update by the signs of its own gradients."""
        self.follow({}, {})

    @torch.no_grad()
    def follow(self, noise: Mapping[Tensor, Noise], layout: Mapping[Tensor, Tensor]) -> None:
        """Make one update. noise: of each gradient, where known; layout: these parameters after this step of the layout."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                moment = self.state[parameter].setdefault("m", torch.zeros_like(parameter))
                direction = beta1 * moment + (1 - beta1) * parameter.grad
                sign = direction.sign()
                if parameter in noise:
                    is_undecided = self._find_undecided(parameter, direction, noise[parameter], beta1, beta2)
                    sign = torch.where(is_undecided, _read_signs(parameter, layout[parameter], group, sign), sign)
                parameter -= group["lr"] * (sign + group["weight_decay"] * parameter)
                moment.copy_(beta2 * moment + (1 - beta2) * parameter.grad)

    def _find_undecided(self, parameter: Tensor, direction: Tensor, noise: Noise, beta1: float, beta2: float) -> Tensor:
        state = self.state[parameter]
        of_moment, of_gradient = state.get("noise", 0.0), noise.size
        is_live = noise.is_live | (state["m"] != 0)
        is_undecided = is_live & (direction.abs() <= beta1 * of_moment + (1 - beta1) * of_gradient)
        state["noise"] = beta2 * of_moment + (1 - beta2) * of_gradient
        state["undecided"] = is_undecided | state.get("undecided", is_undecided)
        return is_undecided


def _read_signs(before: Tensor, after: Tensor, group: Mapping[str, float], otherwise: Tensor) -> Tensor:
    """The signs by which Lion gets from `before` to `after`; `otherwise` where no sign does."""
    if group["lr"] == 0:
        return otherwise
    read = ((1 - group["lr"] * group["weight_decay"]) * before - after.to(before)) / group["lr"]
    is_legal = ((read - read.round()).abs() < LEGAL) & (read.round().abs() <= 1)
    return torch.where(is_legal, read.round(), otherwise)
