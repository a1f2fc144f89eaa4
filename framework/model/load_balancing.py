"""A router's balancing term over all layers of a model, wherever it is cut.

    term = E sum_e f_e P_e        f_e = C_e / N        P_e = S_e / N

Over all layers and their tokens, N in all: C_e counts how often expert e was among the chosen, S_e sums its probabilities (Fedus
et al. 2021, equations 4 to 6, in the form that Hugging Face gave it). C, S and N are sums over layers: each stage adds its own
layers' to those of the stage before and hands them on beside its hidden states, and the last knows the term. The gradient of S
comes back beside that of the hidden states. C has none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from framework.errors import ModelError
from framework.model.materialize import seed_draws
from framework.model.shrink import shrink

# Relative to the term: above the rounding of fp32, below what another formula would make.
LARGEST_DIFFERENCE = 1e-5


@dataclass(frozen=True)
class LoadBalancingLoss:
    """The term's numbers. weight: of the term in the loss."""

    num_experts: int
    top_k: int
    weight: float

    @property
    def num_sums(self) -> int:
        """C, S and N, one behind the other."""
        return 2 * self.num_experts + 1

    def term(self, sums: Tensor) -> Tensor:
        """sums: [2E + 1] of all layers. f is rounded to fp32 whatever their dtype, as Hugging Face's is."""
        counts, probabilities, num_rows = sums.split([self.num_experts, self.num_experts, 1])
        num_rows = num_rows.detach()[0]
        fractions = (
            torch.empty(self.num_experts, dtype=torch.float32, device=sums.device).copy_(counts.detach()) / num_rows
        )
        return self.num_experts * (fractions * probabilities / num_rows).sum()

    def count(self, logits: Tensor) -> Tensor:
        """C, S and N of one layer. logits: [..., E]."""
        logits = logits.flatten(0, -2)
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(self.top_k, -1).indices.flatten()
        wide = probabilities.to(torch.promote_types(logits.dtype, torch.float32))
        counts = wide.new_zeros(self.num_experts).scatter_add_(0, chosen, wide.new_ones(len(chosen)))
        return torch.cat([counts, wide.sum(0), wide.new_full((1,), len(logits))])


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of the sums beside hidden states of this dtype."""
    return torch.promote_types(dtype, torch.float32)


class Routers:
    """The routers of a model, or of a part of it, and what they say in the forward under way.

    dtype: of hidden states. num_copies: so many ranks compute them alike, from gradients that are summed over them: each counts
    as one part of that.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        balance: LoadBalancingLoss,
        dtype: torch.dtype,
        device: torch.device,
        num_copies: int = 1,
    ):
        self.balance, self.dtype, self.device, self._num_copies = balance, sums_dtype(dtype), device, num_copies
        self._logits: list[Tensor] | None = None
        for router, index in find_routers(model):
            router.register_forward_hook(partial(self._note, index))

    def start(self) -> None:
        """A forward begins."""
        self._logits = []

    def end(self, before: Tensor | None = None) -> Tensor:
        """The forward is over: the sums of its layers, [2E + 1], on top of those of the layers before."""
        logits, self._logits = self._logits, None
        assert logits is not None, "no forward was started"
        sums = torch.zeros(self.balance.num_sums, dtype=self.dtype, device=self.device) if before is None else before
        for each in logits:
            own = self.balance.count(each)
            sums = sums + (own.detach() + (own - own.detach()) / self._num_copies).to(self.dtype)
        return sums

    @torch.compiler.disable
    def _note(self, index: int, router: nn.Module, args: Any, output: Any) -> None:
        # Not when a layer is computed again in backward.
        if self._logits is not None:
            self._logits.append(output[index] if isinstance(output, tuple) else output)


def find_routers(model: PreTrainedModel) -> Iterator[tuple[nn.Module, int]]:
    """The modules whose output Hugging Face records as `router_logits`, and where in the output the logits are."""
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
    """The balancing term that the model's config asks for, None if it asks for none. ModelError for a family whose term is
    another: a small copy's is computed by Hugging Face and from sums.
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
        balance = _read(whole, weight)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, KeyError) as error:
        raise _refuse(config, f"it is not one of the routers' logits ({error})") from error
    if not difference <= LARGEST_DIFFERENCE:
        raise _refuse(config, "it is not E sum_e f_e P_e over all layers")
    return balance


def _compare(small: PretrainedConfig) -> float:
    """The relative difference of the two terms of a small model."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        seed_draws(0)
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
        tokens = torch.randint(0, small.get_text_config().vocab_size, (2, 6))
        expected = model(input_ids=tokens).aux_loss
        routers = Routers(model, _read(model, 1.0), torch.float32, torch.device("cpu"))
        routers.start()
        model(input_ids=tokens, output_router_logits=False)
        found = routers.balance.term(routers.end())
    return float((found - expected).abs() / expected.abs())


def _read(model: Any, weight: float) -> LoadBalancingLoss:
    return LoadBalancingLoss(model.num_experts, model.num_experts_per_tok, weight)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _refuse(config: PretrainedConfig, reason: str) -> ModelError:
    return ModelError(
        f"model.config.output_router_logits=true: the balancing term of {config.model_type} models is not known: {reason}."
        " Set it to false"
    )
