"""The oracle: a stock Hugging Face model, stock optimizers, one process, a plain loop.

The oracle and all that it imports know only the recipe's schema and the errors of the framework, so its agreement is
independent: groups, schedules, capacity and rounding are written again (`plain.py`), and the model, its buffers and what stays
in fp32 are those of `from_pretrained`. Where the true result is undecided (Lion's sign of a gradient that is rounding) it
follows the layout.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from framework.recipe.schema import STOCK_ATTENTION, Adapter, Optim, Recipe
from framework.verify.evidence import (
    IGNORE,
    PROBE,
    AnswerBatch,
    Evidence,
    NothingToCompare,
    PluginForms,
    TokenBatch,
    keep_double,
    perturb,
    separate,
)
from framework.verify.plain import (
    DTYPES,
    PlainAdapters,
    PlainLossScale,
    PlainMixtures,
    PlainStability,
    compare_answers,
    decay_nothing,
    find_constants,
    find_groups,
    is_trained,
    learning_rate,
    score_answers,
    widen,
)
from framework.verify.plain_optimizers import Noise, PlainLion, PlainMuon, find_matrices, measure_noise
from framework.verify.plain_rounding import (
    PlainCodes,
    PlainMoments,
    PlainReduction,
    has_no_master,
    multiply_in_fp8,
    round_master,
    round_rows_of_experts,
)

CPU = torch.device("cpu")
# For Lion: how many more times each step's gradients are computed, from weights that are rounded differently.
NUM_PERTURBED = 3
# Errors of stock models, built or run, that want another config or other inputs.
STOCK_ERRORS = (RuntimeError, TypeError, ValueError, LookupError, AttributeError, AssertionError, ImportError)


def run_oracle(
    recipe: Recipe,
    config: PretrainedConfig,
    weights: dict[str, Tensor],
    batches: Sequence[TokenBatch],
    dtype: torch.dtype,
    device: torch.device = CPU,
    layout: Evidence | None = None,
    forms: PluginForms = PluginForms(),  # noqa: B008  (frozen)
) -> Evidence:
    """Train from `weights` on the batches, microbatch after microbatch in one process; forward and backward in `dtype`.

    This is textbook mixed precision: master weights in at least fp32, copied to the model's weights in `dtype`, and gradients
    summed in the masters' dtype. layout: evidence of the layout, for an optimizer that follows its weights or needs its blocks.

    Raises NothingToCompare where stock transformers does not build the model, or does not run it forward or backward.
    """
    layout = layout or Evidence((), (), {}, {})
    oracle = Oracle(recipe, config, weights, dtype, device, layout, forms=forms)
    losses, norms, gradients = [], [], {}
    for step, batch in enumerate(batches):
        plain = partial(learning_rate, schedule=recipe.optim.schedule, peak=recipe.optim.lr, steps=recipe.train.steps)
        oracle.set_rate((forms.rate or plain)(step))
        losses.append(oracle.find_gradients(batch))
        norms.append(oracle.clip())
        if step == 0:
            gradients = oracle.gradients()
        oracle.update(batch, layout.by_step[step] if layout.by_step else {}, step)
    final = {name: weight.detach().cpu() for name, weight in oracle.weights().items()}
    averages = final | oracle.averages if oracle.averages else {}
    undecided = oracle.count_undecided()
    return Evidence(tuple(losses), tuple(norms), gradients, final, undecided=undecided, averages=averages)


class Oracle:
    """A stock model in `dtype`, the masters of its parameters by name, and their optimizer."""

    def __init__(
        self,
        recipe: Recipe,
        config: PretrainedConfig,
        weights: dict[str, Tensor],
        dtype: torch.dtype,
        device: torch.device,
        layout: Evidence | None = None,
        narrows: bool = False,
        forms: PluginForms = PluginForms(),  # noqa: B008  (frozen)
    ):
        """layout: for its blocks, where it has any. narrows: in fp64, let the model cast to fp32 where its code does."""
        layout = layout or Evidence((), (), {}, {})
        self._recipe, self._dtype, self._narrows, self._forms = recipe, dtype, narrows, forms
        of_adapters = [name for name in weights if re.search(r"lora_(A|B|magnitude_vector)$", name)]
        widths: dict[str, tuple[float, float]] = {}
        if recipe.model.mup_base:
            narrow = deepcopy(config)
            narrow.update(recipe.model.mup_base)
            widths = widen(_build_blank(config), _build_blank(narrow))
        weights = {name: weight * widths[name][0] if name in widths else weight for name, weight in weights.items()}
        stock = {name: weight for name, weight in weights.items() if name not in of_adapters}
        self.model = _stock_model(recipe, config, stock, dtype, device)
        # Keyed by the names under which a stock model lists them; `_given`: as given, others of tied ones (camembert's head).
        every = dict(self.model.named_parameters(remove_duplicate=False))
        first = {parameter: name for name, parameter in self.model.named_parameters()}
        self._given = {first[every[name]]: name for name in stock if name in every}
        weights = {first[every[name]] if name in every else name: weight for name, weight in weights.items()}
        wide = torch.promote_types(dtype, torch.float32)
        # Without masters a weight is what the model computes with, from the beginning.
        kept_in = {name: each.dtype for name, each in self.model.named_parameters() if has_no_master(recipe.precision)}
        self.masters = {
            name: nn.Parameter(
                weights[name].to(device, kept_in.get(name, wide)).to(wide, copy=True), parameter.requires_grad
            )
            for name, parameter in self.model.named_parameters()
        }
        self.masters |= {name: nn.Parameter(weights[name].to(device, wide, copy=True)) for name in of_adapters}
        self._adapters = PlainAdapters(self.model, recipe.adapter, self.masters)
        for name in self._adapters.names():
            self.model.get_parameter(name).requires_grad_()
        self._in_bf16 = [name for name, kept in kept_in.items() if kept == torch.bfloat16]
        rates = {name: rate for name, (_, rate) in widths.items()}
        self._optimizer = _stock_optimizer(recipe.optim, self.masters, config, recipe.adapter, rates, forms)
        self._stability = PlainStability(recipe, self.model)
        self._mixtures = PlainMixtures(self.model, recipe.model, recipe.batch.context)
        if recipe.parallel.expert_dispatch == "fp8":
            round_rows_of_experts(self.model)
        self._scale = PlainLossScale(recipe.precision)
        trained = [name for name, each in self.masters.items() if each.requires_grad and recipe.train.ema is not None]
        self.averages = {name: self.masters[name].detach().clone() for name in trained}
        self._moments = PlainMoments(recipe.optim, recipe.precision.moments, recipe.train.seed, layout.blocks)
        self._gather = PlainCodes(recipe.zero.quantize_gather, layout.gathered)
        self._reduction = PlainReduction(recipe, layout.reduced) if layout.reduced else None
        # Beside a loss of preferences, what the answers of a batch are compared with.
        self._reference, self._divergence = torch.empty(0), 0.0

    def set_rate(self, rate: float) -> None:
        """Set the learning rate of the next update, for groups without a ratio of their own."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate * group["lr_ratio"]

    def find_gradients(self, batch: TokenBatch) -> float:
        """Compute the masters' gradients of the batch's loss, and return the loss."""
        if batch.answers is not None:
            self._begin_answers(batch, batch.answers)
        merged = self._read_masters()
        for master in self.masters.values():
            master.grad = None
        self._mixtures.start()
        self._stability.start()
        with self._keeping():
            loss = sum(self._accumulate(batch))
        for name, gradient in self._reduction.take().items() if self._reduction else ():
            self.masters[name].grad = gradient
        of_merged = {name: self.masters[name].grad for name in merged}
        for name in merged:
            self.masters[name].grad = None
        self._adapters.accumulate({name: each for name, each in of_merged.items() if each is not None})
        self._scale.unscale(self.masters.values())
        return loss

    @torch.no_grad()
    def evaluate(self, batch: TokenBatch) -> float:
        """The mean loss per token of the batch, without dropout and without a router's loss."""
        self._read_masters()
        self.model.eval()
        with self._keeping():
            total = sum(float(loss) for loss, _ in self._losses(batch))
        self.model.train()
        return total / int((batch.labels != IGNORE).sum())

    def clip(self) -> float:
        """Clip the gradients as the recipe says, and return their norm before that."""
        limit = self._recipe.optim.clip_norm
        return float(nn.utils.clip_grad_norm_(self.masters.values(), float("inf") if limit is None else limit))

    def gradients(self) -> dict[str, Tensor]:
        """The masters' gradients by name, on the CPU; zeros where a parameter has none."""
        found = {name: torch.zeros_like(m) if m.grad is None else m.grad for name, m in self.masters.items()}
        return {self._given.get(name, name): gradient.detach().to("cpu", copy=True) for name, gradient in found.items()}

    def weights(self) -> dict[str, Tensor]:
        """The masters, and the correction biases of routers that are buffers, by name."""
        buffers = dict(self.model.named_buffers())
        masters = {self._given.get(name, name): master for name, master in self.masters.items()}
        return masters | {name: buffers[name] for name in self._mixtures.names() if name in buffers}

    def update(self, batch: TokenBatch, layout: Mapping[str, Tensor], step: int) -> None:
        """Make one step of the optimizer and of routers' biases, if the gradients are finite. layout: its weights after this
        step, if the oracle follows it."""
        loads = self._mixtures.take()  # before gradients are computed again, which would count tokens, too
        if not self._scale.take():
            return
        self._stability.prepare_update(self._optimizer)
        if isinstance(self._optimizer, PlainLion) and layout:
            noise = self._measure_noise(batch)
            self._optimizer.follow(noise, {master: layout[name] for name, master in self.masters.items()})
        else:
            self._optimizer.step()
        self._stability.correct_update(self._optimizer, self.masters)
        self._moments.round(self._optimizer, self.masters, step)
        for name in self._in_bf16:
            round_master(self.masters[name], (self._recipe.train.seed, "master", step, name))
        self._stability.average(self.averages, self.masters)
        # Last: with biases that have moved, routers would choose other experts, which is no rounding.
        self._mixtures.move(self.weights(), loads)

    def count_undecided(self) -> dict[str, int]:
        """Count the elements whose update rounding decided in some step, by name."""
        masks = {name: self._optimizer.state[master].get("undecided") for name, master in self.masters.items()}
        return {name: int(mask.sum()) for name, mask in masks.items() if mask is not None and mask.any()}

    def _read_masters(self) -> Mapping[str, Tensor]:
        """Set the model's weights to what forward reads of the masters. Returns those that adapters are merged into."""
        merged = self._adapters.merge()
        read = self._gather.round(self.masters) | merged
        for name, parameter in self.model.named_parameters():
            parameter.data.copy_(read.get(name, self.masters[name]))
        return merged

    def _keeping(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._narrows else keep_double(self._dtype)

    def _accumulate(self, batch: TokenBatch) -> Iterator[float]:
        """Add each microbatch's gradients to the masters', and yield its part of the loss."""
        num_tokens = int((batch.labels != IGNORE).sum())
        if batch.answers is not None:
            num_tokens = int((batch.answers.kinds != 0).sum()) // 2
        num_microbatches = len(batch.labels.split(self._recipe.batch.sequences_per_microbatch))
        for number, (total, output) in enumerate(self._losses(batch)):
            loss = total / num_tokens
            if self._recipe.train.router_z_loss:
                loss = loss + self._recipe.train.router_z_loss * self._mixtures.z_loss(output) / num_microbatches
            if getattr(self.model.config, "output_router_logits", False):
                loss = loss + self.model.config.router_aux_loss_coef * output.aux_loss / num_microbatches
            with _telling_of_stock(self.model.config, self._dtype):
                (loss * self._scale.value).backward()
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    master = self.masters[name]
                    gradient = parameter.grad.to(master.dtype)
                    master.grad = gradient if master.grad is None else master.grad + gradient
                    if self._reduction:
                        self._reduction.add(number, name, gradient)
                    parameter.grad = None
            yield loss.item()

    def _losses(self, batch: TokenBatch) -> Iterator[tuple[Tensor, Any]]:
        """The sum of each microbatch's losses, and what the model has returned."""
        first = 0
        for output, target in self._outputs(batch):
            logits = _widen(output.logits)
            if self._forms.loss is not None:
                losses = self._forms.loss(logits, target)
            elif batch.answers is None:
                losses = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORE, reduction="sum")
                if self.model.training and self._recipe.train.z_loss:
                    normalizers = logits[target != IGNORE].exp().sum(-1).log()
                    losses = losses + self._recipe.train.z_loss * normalizers.pow(2).sum()
            else:
                log_p, lengths = score_answers(logits, target)
                part, first = slice(first, first + len(log_p)), first + len(log_p)
                kinds = batch.answers.kinds[batch.answers.kinds != 0].to(log_p.device)[part]
                compared = log_p, lengths, kinds, self._reference.to(log_p)[part], self._divergence
                losses = compare_answers(self._recipe.loss, *compared)
            yield losses.sum(), output

    def _outputs(self, batch: TokenBatch) -> Iterator[tuple[Any, Tensor]]:
        """Each microbatch's output of the model, and its labels; packed documents have rows of their own."""
        device, rows = self.model.device, self._recipe.batch.sequences_per_microbatch
        inputs, labels = batch.input_ids.split(rows), batch.labels.split(rows)
        more = {"output_router_logits": True} if self._recipe.train.router_z_loss else {}
        positions = [None] * len(inputs) if batch.position_ids is None else batch.position_ids.split(rows)
        for input_ids, target, position_ids in zip(inputs, labels, positions, strict=True):
            padding = {}
            if position_ids is not None:
                input_ids, target, is_real = separate(input_ids, target, position_ids)
                padding = {"attention_mask": is_real.long().to(device)}
                self._mixtures.real = is_real.flatten().to(device)
            self._stability.real = self._mixtures.real
            with _telling_of_stock(self.model.config, self._dtype):
                output = self.model(input_ids=input_ids.to(device), **padding, **more)
            yield output, target.to(device)

    @torch.no_grad()
    def _begin_answers(self, batch: TokenBatch, answers: AnswerBatch) -> None:
        """Find the reference's log-probabilities of a batch's answers and kto's divergence."""
        self.model.eval()
        with self._keeping():
            self._reference = answers.reference[answers.kinds != 0]
            if self._recipe.loss.reference == "base":
                for name, parameter in self.model.named_parameters():
                    parameter.data.copy_(self.masters[name])
                self._reference = self._score(batch)
            self._read_masters()
            is_probe = answers.kinds[answers.kinds != 0] == PROBE
            if is_probe.any():
                self._divergence = max(0.0, float((self._score(batch) - self._reference)[is_probe].mean()))
        self.model.train()

    def _score(self, batch: TokenBatch) -> Tensor:
        return torch.cat([score_answers(_widen(each.logits), target)[0] for each, target in self._outputs(batch)]).cpu()

    def _measure_noise(self, batch: TokenBatch) -> dict[Tensor, Noise]:
        """The effect of rounding on the gradients of this step, by master; the gradients are left as they were."""
        masters = self.masters.values()
        own = [(master.detach().clone(), master.grad) for master in masters]
        perturbed: list[list[Tensor | None]] = []
        for seed in range(NUM_PERTURBED):
            for master, (weight, _) in zip(masters, own, strict=True):
                master.data = perturb(weight, self._dtype, seed)
            self.find_gradients(batch)
            self.clip()
            perturbed.append([master.grad for master in masters])
        noise = {}
        for master, (weight, gradient), *others in zip(masters, own, *perturbed, strict=True):
            master.data, master.grad = weight, gradient
            if gradient is not None:
                noise[master] = measure_noise(gradient, [each for each in others if each is not None], self._dtype)
        return noise


@contextmanager
def _telling_of_stock(config: PretrainedConfig, dtype: torch.dtype) -> Iterator[None]:
    """Convert exceptions of the stock model, which are no fault of the oracle's, to NothingToCompare."""
    try:
        yield
    except STOCK_ERRORS as error:
        word = next(word for word, each in DTYPES.items() if each == dtype)
        raise NothingToCompare(
            f"there is nothing to compare with: stock transformers {transformers.__version__} does not train the"
            f" {config.model_type} in {word}: {error}"
        ) from error


def _widen(logits: Tensor) -> Tensor:
    """Logits in at least fp32: the loss is not computed in bf16."""
    return logits if logits.dtype == torch.float64 else logits.float()


def _stock_model(
    recipe: Recipe, config: PretrainedConfig, weights: dict[str, Tensor], dtype: torch.dtype, device: torch.device
) -> PreTrainedModel:
    """The model that transformers makes of a config and weights in `dtype`, with its buffers and parameters kept in fp32."""
    attention = recipe.model.attention
    chosen: dict[str, Any] = (
        {} if attention == "auto" else {"attn_implementation": STOCK_ATTENTION.get(attention, attention)}
    )
    disable_progress_bar()
    with _telling_of_stock(config, dtype):
        values = {name: weight.clone() for name, weight in weights.items()}
        # A checkpoint with towers: its text model is built, which has a config of its own.
        blank = _build_blank(config)
        model: Any = type(blank).from_pretrained(None, config=blank.config, state_dict=values, dtype=dtype, **chosen)
    stored = model.state_dict()
    # Behind its load from_pretrained computes some tables again, in fp32 (gptj's); and what only a constructor sets has no
    # values (apertus' activation). These are of a model from its config.
    computed = [
        name for name, _ in model.named_buffers() if name not in values and (name in stored or dtype == torch.float64)
    ]
    if computed:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            built = dict(AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype).named_buffers())
            for name in computed:
                model.get_buffer(name).copy_(built[name])
    experts = recipe.model.experts
    if experts == "auto" and dtype == torch.float64:
        experts = "eager"  # there is no grouped matmul in fp64
    if experts != "auto" and any(hasattr(each, "is_transposed") for each in model.modules()):
        model.set_experts_implementation(experts)
    # adapter.train may name a tied weight by any of its names.
    named = model.named_parameters(remove_duplicate=not recipe.adapter.is_used)
    constant = set() if recipe.adapter.is_used else find_constants(blank)
    trained = {id(each) for name, each in named if is_trained(name, recipe) and name not in constant}
    for parameter in model.parameters():
        if dtype == torch.float64:  # where fp32 is kept beside bf16, fp64 would be narrowed
            parameter.data = parameter.double()
        parameter.requires_grad_(id(parameter) in trained)
    if recipe.precision.compute == "fp8":
        multiply_in_fp8(model, recipe.precision.fp8_scaling, device)
    return model.to(device).train()


def _build_blank(config: PretrainedConfig) -> PreTrainedModel:
    """The model as its constructor leaves it, without memory."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(deepcopy(config))


def _stock_optimizer(
    optim: Optim,
    masters: Mapping[str, nn.Parameter],
    config: PretrainedConfig,
    adapter: Adapter,
    rates: Mapping[str, float],
    forms: PluginForms,
) -> torch.optim.Optimizer:
    blank = _build_blank(config)
    undecayed = decay_nothing(blank) | {name for name in masters if name.endswith("lora_magnitude_vector")}
    trained = [name for name, master in masters.items() if master.requires_grad]
    groups = [
        {
            "params": [masters[name]],
            "lr_ratio": lr_ratio * rates.get(name, 1.0),
            "decay": weight_decay,  # by the peak rate it is made before the update, by the oracle
            "weight_decay": weight_decay if optim.decay_follows == "schedule" else 0.0,
        }
        for name, lr_ratio, weight_decay in find_groups(trained, undecayed, optim, adapter)
    ]
    if forms.optimizer is not None:
        return forms.optimizer(groups)
    match optim.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, foreach=False)
        case "sgd":
            return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, foreach=False)
        case "muon":
            matrices = find_matrices(blank, config, optim)
            pieces = ({"pieces": matrices.get(name)} for name in trained)
            return PlainMuon([group | each for group, each in zip(groups, pieces, strict=True)], optim)
        case "lion":
            return PlainLion(groups, {"lr": optim.lr, "betas": optim.betas})
