"""A split model beside the whole one: the same weights, sliced by layout; loss and every gradient equal in fp64.

The whole model is stock Hugging Face with its own loss, in one process. No buffer, no optimizer, no hook of ours is in
between: this tests what `parallel/tensor` does to a model, and what its layouts say about it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from framework.comm.collectives import all_reduce
from framework.comm.communicator import Communicator
from framework.comm.connect import connect
from framework.mesh.layout import Layout
from framework.mesh.token_layout import TokenLayout
from framework.mesh.topology import Axis, Topology
from framework.model.chunked_loss import ChunkedLoss, find_logit_map
from framework.model.load import build_meta, choose_experts
from framework.model.loss import IGNORE, Loss, TokenLoss
from framework.model.objective import count_tokens
from framework.model.probe import find_load_balancing_loss
from framework.model.routers import RoutedTokens, Routers
from framework.model.stage import StageBounds
from framework.model.units import find_units, set_parameter, tied_names
from framework.parallel.experts.split import split_experts
from framework.parallel.stage_plan import StagePlan
from framework.parallel.tensor.partition import ranks_per_kv_head
from framework.parallel.tensor.split import split_over_tp
from framework.recipe.schema import Memory, Model, Parallel, Recipe
from framework.verify.compare import NOISE_SHARE
from framework.verify.evidence import keep_double
from tests.families import Family, build_config

CPU = torch.device("cpu")
ROWS, TOKENS = 2, 12


@dataclass(frozen=True)
class TensorCase:
    """One family on `tp` ranks. `changes`: config values on top of the family's; `tokens`: length of the sequences."""

    family: Family
    tp: int
    sequence: bool = False
    changes: Mapping[str, Any] = field(default_factory=dict)
    tokens: int = TOKENS
    chunk_tokens: int | None = None
    regathers: bool = False
    overlaps: bool = False
    sabotage: Callable[[], AbstractContextManager[Any]] | None = None
    spoil: Callable[[dict[str, Layout]], dict[str, Layout]] | None = None

    @property
    def name(self) -> str:
        options = [f"tp={self.tp}", *(f"{key}={value}" for key, value in self.changes.items())]
        options += [word for word in ("sequence", "chunk_tokens", "regathers", "overlaps") if getattr(self, word)]
        if self.tokens != TOKENS:
            options.append(f"{self.tokens} tokens")
        return f"{self.family.name} {' '.join(options)}"

    @property
    def config(self) -> PretrainedConfig:
        config = build_config(self.family, **self.changes)
        config.use_cache = False
        return config


def compare_cases(rank: int, world: int, rendezvous: str, cases: Sequence[TensorCase]) -> dict[str, float]:
    """Body: the worst relative error of each case, on the ranks that were in it."""
    worst: dict[str, float] = {}
    by_topology: dict[Topology, list[TensorCase]] = {}
    for case in cases:
        topology = Topology(dp=world // case.tp, tp=case.tp, kv=ranks_per_kv_head(case.config, case.tp))
        by_topology.setdefault(topology, []).append(case)
    for number, (topology, its_cases) in enumerate(by_topology.items()):
        mesh = connect(topology, CPU, f"{rendezvous}-{number}", rank)
        # Copies of the mesh share the cases: each is one tensor-parallel group.
        for case in its_cases[mesh.axis("dp").rank :: topology.dp]:
            try:
                with case.sabotage() if case.sabotage else nullcontext():
                    worst[case.name] = compare_case(case, mesh.axis("tp"), mesh.axis("kv"))
            except Exception as error:
                raise AssertionError(case.name) from error
        mesh.close()
    return worst


def compare_case(case: TensorCase, tp: Communicator, kv: Communicator) -> float:
    """The worst relative error of the loss and of all gradients, in fp64."""
    torch.manual_seed(3)
    whole = build_whole(case.config)
    ids = torch.randint(3, case.config.get_text_config().vocab_size, (ROWS, case.tokens))
    labels = ids.roll(-1, 1).masked_fill(torch.rand(ids.shape) < 0.3, IGNORE)
    labels[:, -1] = IGNORE
    with keep_double(torch.float64):
        # One rank is enough to ask the whole model.
        expected = expect_whole(whole, ids, labels) if tp.rank == 0 else {}
        split, layouts = build_split(case, whole, tp, kv)
        loss_of = make_loss(case, split, tp, split_vocabulary(split, layouts))
        term = find_load_balancing_loss(whole)
        axes = {"tp": tp, "cp": Communicator(Axis("cp", 1, 0))}
        tokens = RoutedTokens.whole(TokenLayout(ROWS, case.tokens, tp.axis), axes)
        routers = None if term is None else Routers(split, term, torch.float64, CPU, tokens)
        if routers is not None:
            routers.start()
        loss_of.expect(labels)
        output = split(input_ids=ids)
        loss = loss_of(output.logits, labels, count_tokens(labels, None).sum())
        if routers is not None:
            loss = loss + routers.loss.weight * routers.loss.compute(routers.end())
        loss.backward()
    found = {"loss": loss.detach()} | gather_gradients(split, case.spoil(layouts) if case.spoil else layouts, tp, kv)
    assert layouts.keys() == dict(whole.named_parameters(remove_duplicate=False)).keys()
    if tp.rank != 0:
        return 0.0
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    # A key's bias cancels in the softmax: its gradient is rounding noise.
    floor = NOISE_SHARE * max(float(each.abs().max()) for each in expected.values())
    return max(relative_error(found[name], expected[name], floor) for name in expected)


def make_loss(case: TensorCase, split: PreTrainedModel, tp: Communicator, vocabulary: int) -> Loss:
    if case.chunk_tokens is None:
        return TokenLoss(tp, vocabulary)
    logit_map = find_logit_map(build_meta(case.config), torch.float64)
    return ChunkedLoss(split.get_output_embeddings(), (), logit_map, tp, vocabulary, case.chunk_tokens)


def build_whole(config: PretrainedConfig) -> PreTrainedModel:
    """A stock model with random weights everywhere: zeros and ones of norms and biases would hide mistakes."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    choose_experts(model, "auto", torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.double()  # ernie's routers are made in fp32, whatever is asked for
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.train()


def expect_whole(whole: PreTrainedModel, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
    output = whole(input_ids=ids)
    total = nn.functional.cross_entropy(
        output.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    loss = total / (labels != IGNORE).sum() + balance(whole, output)
    loss.backward()
    gradients = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach()} | gradients


def balance(model: PreTrainedModel, output: Any) -> Tensor | float:
    if not getattr(model.config, "output_router_logits", False):
        return 0.0
    return model.config.router_aux_loss_coef * output.aux_loss


def build_split(
    case: TensorCase, whole: PreTrainedModel, tp: Communicator, kv: Communicator
) -> tuple[PreTrainedModel, dict[str, Layout]]:
    """The split model with the whole one's weights and buffers."""
    model = build_meta(case.config)
    choose_experts(model, "auto", torch.float64)
    layouts = split(model, tp, kv, case.sequence, case.tokens, recipe_of(case.regathers, case.overlaps))
    weights = dict(whole.named_parameters(remove_duplicate=False))
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, aliases in names.items():
        values = take(weights[aliases[0]].detach(), replace(layouts[aliases[0]], interval=None))
        assert values.shape == parameter.shape, (aliases, values.shape, parameter.shape)
        set_parameter(model, tuple(aliases), nn.Parameter(values, requires_grad=parameter.requires_grad))
    modules = dict(model.named_modules())
    for name, tensor in whole.named_buffers():
        path, _, leaf = name.rpartition(".")
        modules[path]._buffers[leaf] = tensor.clone()
    return model.train(), layouts


def recipe_of(regathers: bool = False, overlaps: bool = False, tp_plan: Mapping[str, str] | None = None) -> Recipe:
    """What of a recipe tensor parallelism reads."""
    return Recipe(
        model=Model(tp_plan=dict(tp_plan or {})),
        memory=Memory(gathered_inputs="regather" if regathers else "keep"),
        parallel=Parallel(overlap="always" if overlaps else "never"),
    )


def split(
    model: PreTrainedModel,
    tp: Communicator,
    kv: Communicator,
    sequence: bool,
    tokens: int = TOKENS,
    recipe: Recipe | None = None,
) -> dict[str, Layout]:
    """A whole model on meta, in one stage, split over the axes."""
    units = find_units(model)
    num_layers = sum(unit.is_layer for unit in units)
    alone = {name: Communicator(Axis(name, 1, 0)) for name in ("ep", "ep_inner", "ep_outer", "cp")}
    plan = StagePlan(
        recipe=recipe or recipe_of(),
        axes={"tp": tp, "kv": kv, "expert_tp": tp, **alone},
        bounds=StageBounds(0, 1, 0, num_layers),
        tokens=TokenLayout(ROWS, tokens, tp.axis, sequence),
        units=tuple(units),
        ties=tied_names(model),
        groups={},
        compute_dtype=torch.float64,
        master_dtype=torch.float64,
        device=CPU,
    )
    whole = {name: Layout(tuple(p.shape)) for name, p in model.named_parameters(remove_duplicate=False)}
    return split_over_tp(model, split_experts(model, whole, plan), plan)


def split_vocabulary(model: PreTrainedModel, layouts: Mapping[str, Layout]) -> int:
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    return layouts[f"{name}.weight"].shape[0]


def gather_gradients(
    model: nn.Module, layouts: Mapping[str, Layout], tp: Communicator, kv: Communicator
) -> dict[str, Tensor]:
    """Law 1 and boxes alone: sum over the partial axes, then every rank contributes what it owns."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        layout, gradient = layouts[name], parameter.grad.contiguous()
        start, stop = layout.interval or (0, gradient.numel())
        for axis in (tp, kv):
            if axis.name in layout.partial:
                all_reduce(gradient, axis)
        gathered = torch.zeros(layout.shape, dtype=gradient.dtype)
        owned, first = gradient.flatten()[start:stop], 0
        for box in layout.boxes():
            gathered[box.slices()] = owned[first : first + box.numel].view(box.sizes)
            first += box.numel
        all_reduce(gathered, tp)
        gradients[name] = gathered
    return gradients


def take(full: Tensor, layout: Layout) -> Tensor:
    """The local tensor of a layout."""
    pieces = [full[box.slices()].flatten() for box in layout.boxes()]
    return torch.cat(pieces).view(layout.shape_local).clone()


def relative_error(found: Tensor, expected: Tensor, floor: float = 1e-30) -> float:
    """Infinite where something is not a number: that compares with nothing."""
    error = float((found - expected).abs().max() / expected.abs().max().clamp(min=floor))
    return error if isfinite(error) else inf
