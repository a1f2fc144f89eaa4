"""Mixtures of experts of a model, found by structure, and how many tokens their experts are sent.

A mixture is a module of stacked experts, the router that Hugging Face records, and the bias that corrects the router's choice, if
it has one. Most experts are called with the chosen experts of each token; llama4's are called with all tokens for each expert,
weighted by its router's scores, which are zero where an expert was not chosen.

Hooks count loads on the device, in training forwards only: not in validation, and not where a checkpointed layer runs once more
for backward. Of ranks that see the same tokens one counts, and nobody counts padding, so the sum over the world is the batch's,
whatever the layout. Counts are whole numbers below 2^53 and exact in fp64, in any order of addition. A row of the sums
[mixtures, widest + 1 + 3] is one mixture of the whole model:

    tokens of each expert (padded to the widest mixture, and one place for ids beyond it) | entropy | routed tokens | dropped
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.errors import ModelError
from framework.model.experts import ExpertsForm, count_experts, form_of
from framework.model.opaque import ShownTensors
from framework.model.routers import RoutedTokens, find_routers
from framework.model.units import Unit
from framework.recipe.schema import Model

# Added to a router's scores when it chooses experts, and to nothing else: no gradient reaches it.
CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias")


@dataclass(frozen=True)
class Mixture:
    """One mixture of experts."""

    layer: str  # name of its unit
    experts: str  # path of the module
    num_experts: int
    router: str  # path of the module; "" where Hugging Face records none
    logits: int  # their index in the router's output
    form: ExpertsForm
    bias: str  # full name of the correction bias, a buffer or a parameter of num_experts elements; "" for none


def find_mixtures(model: PreTrainedModel, units: Sequence[Unit]) -> tuple[Mixture, ...]:
    """All mixtures of the model's layers, in order; none for a dense model. units: of the whole model."""
    paths = {module: path for path, module in model.named_modules()}
    routers = {paths[module]: logits for module, logits in find_routers(model)}
    sizes = {name: each.numel() for name, each in chain(model.named_parameters(), model.named_buffers())}
    biases = {name: size for name, size in sizes.items() if name.rpartition(".")[2] in CORRECTION_BIASES}
    found = []
    for unit in (unit for unit in units if unit.is_layer):
        for path in unit.modules:
            module = model.get_submodule(path)
            if (form := form_of(module)) is None:
                continue
            block, count = f"{path.rpartition('.')[0]}.", count_experts(module)
            router = next((each for each in routers if each.startswith(block)), "")
            bias = next((name for name, size in biases.items() if name.startswith(block) and size == count), "")
            found.append(Mixture(unit.name, path, count, router, routers.get(router, 0), form, bias))
    return tuple(found)


def find_constants(model: PreTrainedModel) -> set[str]:
    """Names of the parameters that the family's own code freezes, such as tables of sines (roformer, marian); none of correction
    biases, which have no gradient and are moved by other means."""
    named = model.named_parameters(remove_duplicate=False)
    return {name for name, each in named if not each.requires_grad and not name.endswith(CORRECTION_BIASES)}


def refuse_bias_rate(settings: Model, model: PreTrainedModel, mixtures: Sequence[Mixture]) -> None:
    """Raise ModelError where the recipe moves biases that the model does not have, or that it freezes."""
    if not settings.router_bias_rate:
        return
    key = f"model.router_bias_rate={settings.router_bias_rate:g}"
    biases = [each.bias for each in mixtures if each.bias]
    if not biases:
        what = "routers without a correction bias of one number for each expert" if mixtures else "no experts"
        other = "; or take their auxiliary loss, model.config.output_router_logits=true" if mixtures else ""
        raise ModelError(
            f"{key} moves the bias with which routers correct their choice of experts, but {model.config.model_type} models have"
            f" {what}: set model.router_bias_rate=0{other}"
        )
    trained = [name for name, _ in model.named_parameters() if name in biases]  # freezing says nothing of buffers
    frozen = next((pattern for pattern in settings.freeze if any(re.search(pattern, name) for name in trained)), None)
    if frozen is not None:
        raise ModelError(
            f"{key} moves {trained[0]}, which model.freeze={frozen!r} leaves as it is: set model.router_bias_rate=0, or take a"
            " pattern that matches no bias of routers"
        )


# Places of a row, from its end.
ENTROPY, ROUTED, DROPPED = -3, -2, -1


class ExpertLoad:
    """The loads of this rank's experts in the current step. One for all stages of a rank; lives as long as the run.

    mixtures: the whole model's, equal on all ranks. world: over which the sums are made. always: count in every step, whether it
    is reported or not.
    """

    def __init__(self, mixtures: Sequence[Mixture], world: Communicator, device: torch.device, always: bool = False):
        self.mixtures = tuple(mixtures)
        widest = max((each.num_experts for each in self.mixtures), default=0)
        self.sums = torch.zeros(len(self.mixtures), widest + 4, dtype=torch.float64, device=device)
        self._one = torch.ones((), dtype=torch.float64, device=device)
        self._world, self._always = world, always
        self._is_counted = self._is_reported = self._is_counting = False
        self._rows: dict[nn.Module, int] = {}

    def watch(self, model: nn.Module, layers: Sequence[str], tokens: RoutedTokens) -> None:
        """Count in these layers of a stage's model. tokens: those that its routers see. Ranks that do not count get no hooks."""
        for row, mixture in enumerate(self.mixtures):
            if mixture.layer not in layers or not tokens.is_counted:
                continue
            experts = model.get_submodule(mixture.experts)
            self._rows[experts] = row
            if not mixture.form.is_expert_major:
                experts.register_forward_pre_hook(
                    partial(_show_chosen, ShownTensors(partial(self._count_chosen, row, tokens)))
                )
            if mixture.router:
                router = model.get_submodule(mixture.router)
                router.register_forward_hook(
                    partial(_show_output, ShownTensors(partial(self._note_router, row, tokens)))
                )

    def start_step(self, is_reported: bool) -> None:
        """Begin a step. is_reported: its sums are read."""
        self._is_reported = is_reported
        self._is_counted = bool(self.mixtures) and (is_reported or self._always)
        if self._is_counted:
            self.sums.zero_()

    @contextmanager
    def counting(self) -> Iterator[None]:
        """A context for a training forward, in which loads are counted."""
        self._is_counting = self._is_counted
        try:
            yield
        finally:
            self._is_counting = False

    def drop(self, experts: nn.Module, count: Tensor) -> None:
        """Count tokens that experts have dropped. count: scalar on the device."""
        if self._is_counting and experts in self._rows:
            self.sums[self._rows[experts], DROPPED] += count

    def sum_over_ranks(self) -> Tensor | None:
        """The sums of the batch, [mixtures, widest + 4] fp64, equal on all ranks and valid until the next step; None where this
        step has none. Collective over the world: an all-reduce of them."""
        if not self._is_counted:
            return None
        all_reduce(self.sums, self._world, label="expert load")
        return self.sums

    def _count_chosen(self, row: int, tokens: RoutedTokens, shown: Sequence[Tensor]) -> None:
        """shown: the experts of each token."""
        if self._is_counting:
            chosen = tokens.cut(shown[0]).flatten()
            last = self.mixtures[row].num_experts
            # Ids beyond the experts are of no expert (a token's way around the mixture): counted in the place behind them.
            self.sums[row, : last + 1].scatter_add_(0, chosen.long().clamp(max=last), self._one.expand(len(chosen)))

    def _note_router(self, row: int, tokens: RoutedTokens, outputs: Sequence[Tensor]) -> None:
        """outputs: of the router."""
        if not self._is_counting:
            return
        mixture = self.mixtures[row]
        if mixture.form.is_expert_major:
            scores = tokens.cut(outputs[1 - mixture.logits].detach())
            self.sums[row, : mixture.num_experts] += (scores > 0).sum(0)
        if self._is_reported:
            logits = tokens.cut(outputs[mixture.logits].detach().flatten(0, -2))
            self.sums[row, ENTROPY] += torch.special.entr(logits.float().softmax(-1)).sum()
            self.sums[row, ROUTED] += len(logits)


def _show_chosen(note: ShownTensors, experts: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A hook in front of experts: (hidden states, the experts of each token, ...)."""
    return args[0], note([args[1]]), *args[2:]


def _show_output(note: ShownTensors, router: nn.Module, args: Any, output: Any) -> Any:
    """A hook behind a router: its tensor, or several."""
    return (*output[:-1], note(output)) if isinstance(output, tuple) else note([output])


def chosen_tokens(sums: Tensor) -> Tensor:
    """The tokens of each expert, [mixtures, widest]: a view of the sums [mixtures, widest + 4]."""
    return sums[:, :-4]


@dataclass(frozen=True)
class MixtureLoad:
    """The load of one mixture in one batch."""

    tokens: tuple[int, ...]  # of each expert
    entropy: float | None  # of the router: nats, a mean over tokens; None where the router is not known
    dropped: int  # tokens

    @property
    def imbalance(self) -> float:
        """The largest load over the mean, from 1 to the number of experts; NaN without a token."""
        return max(self.tokens) * len(self.tokens) / sum(self.tokens) if any(self.tokens) else float("nan")


def read_loads(mixtures: Sequence[Mixture], sums: Sequence[float]) -> Mapping[str, MixtureLoad]:
    """The loads by layer; a layer's second mixture is named by its path. sums: `ExpertLoad.sum_over_ranks`, flat, on the host."""
    loads: dict[str, MixtureLoad] = {}
    width = len(sums) // len(mixtures)
    for index, mixture in enumerate(mixtures):
        row = sums[index * width : (index + 1) * width]
        entropy = row[ENTROPY] / row[ROUTED] if row[ROUTED] else None
        tokens = tuple(int(each) for each in row[: mixture.num_experts])
        name = mixture.layer if mixture.layer not in loads else mixture.experts
        loads[name] = MixtureLoad(tokens, entropy, int(row[DROPPED]))
    return loads
