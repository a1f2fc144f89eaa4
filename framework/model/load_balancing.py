"""The load-balancing (auxiliary) loss of routers over all layers of a model, however the model is split into stages.

    loss = E sum_e f_e P_e        f_e = C_e / N        P_e = S_e / N

C_e counts how often expert e was among the chosen ones, S_e sums its probabilities, over all layers and their tokens, N in all
(Fedus et al. 2021, equations 4 to 6, in Hugging Face's form). The loss is no sum over layers, but C, S and N are: each stage adds
those of its own layers to what it received and sends them beside its hidden states, so that the last stage can compute the loss.
The gradient of S comes back beside that of the hidden states; C and N have none.

Shapes: B sequences of T tokens, E experts; a vector of sums is [2E + 1], C before S before N, in at least fp32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from framework.comm.duals import reduce_from
from framework.errors import ModelError
from framework.model.initial import seed_rng
from framework.model.precision import sums_dtype
from framework.model.routed_tokens import RoutedTokens
from framework.model.shrink import shrink

# Relative to the loss: above the rounding of fp32, below the difference that another formula makes.
LARGEST_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class LoadBalancingLoss:
    """The loss of `num_experts` experts of which each token is sent to `top_k`. weight: its factor in the training loss."""

    num_experts: int
    top_k: int
    weight: float

    @property
    def num_sums(self) -> int:
        """Length of a vector of sums."""
        return 2 * self.num_experts + 1

    def compute(self, sums: Tensor) -> Tensor:
        """The loss, a scalar, from the sums [2E + 1] of all layers. Differentiable in S."""
        counts, probabilities, num_rows = sums.split([self.num_experts, self.num_experts, 1])
        num_rows = num_rows.detach()[0]
        # In fp32 whatever the dtype of the sums: Hugging Face counts with one_hot(...).float(), and fp64 runs must agree to 1e-9.
        fractions = (
            torch.empty(self.num_experts, dtype=torch.float32, device=sums.device).copy_(counts.detach()) / num_rows
        )
        return self.num_experts * (fractions * probabilities / num_rows).sum()

    def sum_tokens(self, logits: Tensor) -> Tensor:
        """The sums [2E + 1] of one layer, in at least fp32, from its router's logits [..., E]. Differentiable in S."""
        logits = logits.flatten(0, -2)
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(self.top_k, -1).indices.flatten()
        # Counts above 256 do not fit into bf16, and probabilities of many tokens would be lost in its rounding.
        wide = probabilities.to(sums_dtype(logits.dtype))
        counts = wide.new_zeros(self.num_experts).scatter_add_(0, chosen, wide.new_ones(len(chosen)))
        return torch.cat([counts, wide.sum(0), wide.new_full((1,), len(logits))])


class Routers:
    """The routers of a model, or of a stage of it, and their logits in the current forward.

    dtype: of hidden states. tokens: those that the routers see. Where several ranks see the same ones, gradients are summed
    over these ranks afterwards, so each contributes its part of the gradient; where each sees others, their sums are added
    before the loss, which is no sum over tokens, and each rank's tokens get their own gradient.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        loss: LoadBalancingLoss,
        dtype: torch.dtype,
        device: torch.device,
        tokens: RoutedTokens | None = None,
    ):
        self.loss, self.dtype, self.device = loss, sums_dtype(dtype), device
        self.tokens = tokens or RoutedTokens.of_one_rank()
        self._logits: list[Tensor] | None = None
        for router, index in find_routers(model):
            router.register_forward_hook(partial(self._note, index))

    def start(self) -> None:
        """Begin a forward: from here on logits are collected."""
        self._logits = []

    def end(self, before: Tensor | None = None) -> Tensor:
        """End the forward and return the sums [2E + 1] of its layers, added to `before`, those of the stages before.

        Where ranks see different tokens, an all-reduce of the sums over them, if the stage has a router; backward sends nothing.
        """
        logits, self._logits = self._logits, None
        assert logits is not None, "no forward was started"
        sums = torch.zeros(self.loss.num_sums, dtype=self.dtype, device=self.device) if before is None else before
        if logits:
            own = torch.stack([self.loss.sum_tokens(self.tokens.cut(each.flatten(0, -2))) for each in logits])
            # All layers in one message, and added one after another: so no stage's cut changes how they are rounded.
            for layer in reduce_from(self._share(own).to(self.dtype), self.tokens.over):
                sums = sums + layer
        return sums

    def compute_loss(self, sums: Tensor) -> Tensor:
        """The weighted loss of a microbatch, a scalar, from the sums [2E + 1] of all layers.

        Ranks of `cp` have the same sums: all have the gradient of their own tokens, and one of them the value, because values
        are added over the ranks that share a microbatch's tokens.
        """
        loss = self.loss.weight * self.loss.compute(sums)
        return loss if self.tokens.slices.rank == 0 else loss - loss.detach()

    def _share(self, own: Tensor) -> Tensor:
        """The value in full, since the sums are alike on all copies; of the gradient a part only."""
        return own.detach() + (own - own.detach()) / (self.tokens.copies.size if self.tokens.sums_copies else 1)

    @torch.compiler.disable
    def _note(self, index: int, router: nn.Module, args: Any, output: Any) -> None:
        # Outside a forward (None) a checkpointed layer is recomputed for backward: its tokens have been counted.
        if self._logits is not None:
            self._logits.append(output[index] if isinstance(output, tuple) else output)


def find_routers(model: PreTrainedModel) -> Iterator[tuple[nn.Module, int]]:
    """The modules whose output Hugging Face records as `router_logits`, each with the index of the logits in its output."""
    parts = [module for module in model.modules() if isinstance(module, PreTrainedModel)]
    recorders: list[Any] = []
    for part in parts:
        recorder = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", [])
        recorders += [each for each in _as_list(recorder) if each not in recorders]
    for module in model.modules():
        for recorder in recorders:
            target, index = (recorder, 1) if isinstance(recorder, type) else (recorder.target_class, recorder.index)
            if isinstance(module, target):
                yield module, index


def find_load_balancing_loss(whole: PreTrainedModel) -> LoadBalancingLoss | None:
    """The load-balancing loss that the model's config asks for, or None.

    A small copy of the model computes it in Hugging Face's code and from the sums; raises ModelError for a family where the two
    differ.
    """
    config = whole.config
    if not getattr(config, "output_router_logits", False):
        return None
    weight = getattr(config, "router_aux_loss_coef", None)
    if weight is None:
        raise _refuse(config, "it has no router_aux_loss_coef")
    small = shrink(config)
    small.output_router_logits, small.use_cache = True, False
    try:
        difference = _compare(small)
        loss = _read(whole, weight)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
        raise _refuse(config, f"it is not one of the routers' logits ({error})") from error
    if not difference <= LARGEST_DIFFERENCE:
        raise _refuse(config, "it is not E sum_e f_e P_e over all layers")
    return loss


def _compare(small: PretrainedConfig) -> float:
    """The relative difference between Hugging Face's loss and ours, of a small model."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        seed_rng(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
        tokens = torch.randint(0, small.get_text_config().vocab_size, (2, 6))
        expected = model(input_ids=tokens).aux_loss
        routers = Routers(model, _read(model, 1.0), torch.float32, torch.device("cpu"))
        routers.start()
        model(input_ids=tokens, output_router_logits=False)
        found = routers.loss.compute(routers.end())
    return float((found - expected).abs() / expected.abs())


def _read(model: Any, weight: float) -> LoadBalancingLoss:
    return LoadBalancingLoss(model.num_experts, model.num_experts_per_tok, weight)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _refuse(config: PretrainedConfig, reason: str) -> ModelError:
    return ModelError(
        f"model.config.output_router_logits=true: the load-balancing loss of {config.model_type} models is not known: {reason}."
        " Set it to false"
    )
