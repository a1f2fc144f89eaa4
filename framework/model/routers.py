"""Routers of experts: the tokens that they see on a rank, and their load-balancing (auxiliary) loss over all layers of a model.

    loss = E sum_e f_e P_e        f_e = C_e / N        P_e = S_e / N

C_e counts how often expert e was among the chosen ones, S_e sums its probabilities, over all layers and their tokens, N in all
(Fedus et al. 2021, equations 4 to 6, in Hugging Face's form). The loss is no sum over layers, but C, S and N are: each stage adds
those of its own layers to what it received and sends them beside its hidden states, so that the last stage can compute the loss.
The gradient of S comes back beside that of the hidden states; C and N have none.

The router z-loss (Zoph et al. 2022, arXiv 2202.08906) is the mean of (log sum_e exp x_e)^2 over the same tokens, from
one more sum. Where it is the only loss of routers, E is 0 here.

Shapes: B sequences of T tokens, E experts; a vector of sums is [2E + 1], C before S before N, in at least fp32; with a z-loss its
sum is one more in front.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from framework.comm.collectives import all_gather
from framework.comm.communicator import Communicator
from framework.comm.duals import reduce_from
from framework.mesh.token_layout import ContextSlices, TokenLayout
from framework.mesh.topology import Axis
from framework.model.precision import sums_dtype


@dataclass(frozen=True)
class RoutedTokens:
    """The rows that routers and experts of this rank are given, sequence after sequence."""

    slices: ContextSlices  # the tokens of each sequence that this rank of `cp` holds
    parts: int  # ranks of `tp` that divide those
    rows: int  # of each sequence here
    valid: int  # rows of each sequence, in front, that are tokens; the rest is padding
    copies: Communicator  # ranks that see the same tokens
    over: Communicator  # ranks that see other tokens of the same sequences: `parts` of tp in each of cp
    sums_copies: bool = False  # whether gradients of the copies are parts of a sum, as inside a region, or equal

    @classmethod
    def whole(cls, tokens: TokenLayout, axes: Mapping[str, Communicator]) -> "RoutedTokens":
        """All tokens of the slices on each rank of `tp`: inside a region."""
        rows, valid = tokens.context, tokens.valid_inside
        return cls(_slices_of(tokens), 1, rows, valid, axes["tp"], axes["cp"], sums_copies=True)

    @classmethod
    def outside(cls, tokens: TokenLayout, axes: Mapping[str, Communicator]) -> "RoutedTokens":
        """The rows of a rank of `tp` between regions, where the routers of whole experts stand: a part of the slices' tokens with
        sequence parallelism, else all of them."""
        return (
            cls.divided(tokens, axes) if tokens.num_parts > 1 else replace(cls.whole(tokens, axes), sums_copies=False)
        )

    @classmethod
    def divided(cls, tokens: TokenLayout, axes: Mapping[str, Communicator]) -> "RoutedTokens":
        """A part of the slices' tokens on each rank of `tp`, as between regions under sequence parallelism."""
        rows, valid = tokens.tokens_local, tokens.valid_local
        return cls(_slices_of(tokens), tokens.num_parts, rows, valid, copies=_alone(), over=axes["context_tp"])

    @classmethod
    def of_one_rank(cls) -> "RoutedTokens":
        """Rows without padding that no other rank sees."""
        return cls(ContextSlices(1), 1, 1, 1, copies=_alone(), over=_alone())

    @property
    def is_counted(self) -> bool:
        """Whether this rank counts its tokens: one of the ranks that see them does."""
        return self.copies.rank == 0

    @property
    def are_shared_out(self) -> bool:
        """Whether the copies may divide the rows among them: each sees all rows, and computes the same."""
        return self.copies.size > 1 and not self.sums_copies

    @property
    def has_padding(self) -> bool:
        """Whether some rank's rows are filled up."""
        return self.rows * self.over.size > self.slices.context

    def is_padding(self, rows: Tensor) -> Tensor:
        """Whether each row is padding: [T, 1] bool.  rows: [T, ...]."""
        place = torch.arange(rows.shape[0], device=rows.device) % self.rows
        return (place >= self.valid).unsqueeze(1)

    def join(self, x: Tensor) -> Tensor:
        """All tokens of the sequences, in order.  x: [T, k] -> [sequences, context, k]. An all-gather over `over`; not
        differentiable."""
        x = x.unflatten(0, (-1, self.rows))
        gathered = x.new_empty(self.over.size, *x.shape)
        all_gather(gathered, x.contiguous(), self.over)
        # Neighbours of tp have the parts of one rank's slices: [cp, parts, sequences, rows, k] -> [cp, sequences, tokens, k].
        parts = gathered.unflatten(0, (self.slices.ranks, self.parts)).transpose(1, 2).flatten(2, 3)
        return self.slices.join(parts[:, :, : self.slices.tokens_local])

    def own(self, x: Tensor) -> Tensor:
        """This rank's rows of x: [sequences, context, k] -> [T, k], zeros for padding."""
        x = self.slices.cut(x, 0)
        missing = self.rows * self.parts - x.shape[1]
        return F.pad(x, (0, 0, 0, missing)).chunk(self.parts, dim=1)[self.over.rank % self.parts].flatten(0, 1)

    def cut(self, x: Tensor) -> Tensor:
        """x without padding: [sequences * rows, ...] -> [sequences * valid, ...]."""
        return x if self.valid == self.rows else x.unflatten(0, (-1, self.rows))[:, : self.valid].flatten(0, 1)


def _slices_of(tokens: TokenLayout) -> ContextSlices:
    return tokens.slices or ContextSlices(tokens.context)


def _alone() -> Communicator:
    return Communicator(Axis("alone", 1, 0))


@dataclass(frozen=True)
class LoadBalancingLoss:
    """The loss of `num_experts` experts of which each token is sent to `top_k`. weight: its factor in the training loss; z_loss:
    that of the router z-loss."""

    num_experts: int
    top_k: int
    weight: float
    z_loss: float = 0.0

    @property
    def num_sums(self) -> int:
        """Length of a vector of sums."""
        return 2 * self.num_experts + 1 + bool(self.z_loss)

    def compute(self, sums: Tensor) -> Tensor:
        """The load-balancing loss, a scalar, from the sums [2E + 1] of all layers. Differentiable in S."""
        counts, probabilities, num_rows = sums[bool(self.z_loss) :].split([self.num_experts, self.num_experts, 1])
        num_rows = num_rows.detach()[0]
        # In fp32 whatever the dtype of the sums: Hugging Face counts with one_hot(...).float(), and fp64 runs must agree to 1e-9.
        fractions = (
            torch.empty(self.num_experts, dtype=torch.float32, device=sums.device).copy_(counts.detach()) / num_rows
        )
        return self.num_experts * (fractions * probabilities / num_rows).sum()

    def weigh(self, sums: Tensor) -> Tensor:
        """All losses of routers in the training loss, a scalar, from the sums of all layers."""
        loss = self.weight * self.compute(sums) if self.num_experts else sums.new_zeros(())
        return loss + self.z_loss * sums[0] / sums[-1].detach() if self.z_loss else loss

    def sum_tokens(self, logits: Tensor) -> Tensor:
        """The sums [2E + 1] of one layer, in at least fp32, from its router's logits [..., E]. Differentiable in S."""
        logits = logits.flatten(0, -2)
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(self.top_k, -1).indices.flatten()
        # Counts above 256 do not fit into bf16, and probabilities of many tokens would be lost in its rounding.
        wide = probabilities.to(sums_dtype(logits.dtype))
        counts = wide.new_zeros(self.num_experts).scatter_add_(0, chosen, wide.new_ones(len(chosen)))
        z = [logits.to(wide.dtype).logsumexp(-1).square().sum().view(1)] if self.z_loss else []
        return torch.cat([*z, counts, wide.sum(0)[: self.num_experts], wide.new_full((1,), len(logits))])


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
        """Begin a forward: collect logits from now on."""
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
        loss = self.loss.weigh(sums)
        return loss if self.tokens.slices.rank == 0 else loss - loss.detach()

    def _share(self, own: Tensor) -> Tensor:
        """The full value, because the sums are equal on all copies, with a part of the gradient."""
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
        found = (getattr(part, "_can_record_outputs", None) or {}).get("router_logits", [])
        recorders += [each for each in (found if isinstance(found, list) else [found]) if each not in recorders]
    for module in model.modules():
        for recorder in recorders:
            target, index = (recorder, 1) if isinstance(recorder, type) else (recorder.target_class, recorder.index)
            if isinstance(module, target):
                yield module, index
