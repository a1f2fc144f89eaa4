"""A replayed forward is the model's own in every bit, and nothing that depends on data is ever taken for a constant."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import CausalLMOutput

from framework.model.replay import ReplayedForward, replay_forward
from framework.model.stage import StageModel, find_layer_outputs, hollow_out, split_stages
from framework.model.units import find_units
from tests.families import FAMILIES, build_config, is_kind
from tests.grid import few_of

VOCABULARY, WIDTH, SHAPE = 97, 8, (2, 6)
LAYERS = ["layers.0", "layers.1"]


def tokens_of(step: int, shape: tuple[int, int] = SHAPE) -> Tensor:
    return torch.randint(0, VOCABULARY, shape, generator=torch.Generator().manual_seed(step))


# Families of which some stage runs the model's own code, and why: it scales or adds between its modules, or behind the last.
NEVER = {"granite", "granitemoe"}
NOT_WITH_EMBEDDING = {"gpt2", "gpt_bigcode", "gpt_neo", "opt", "biogpt", "xglm"}
NOT_WITH_HEAD = {"gemma2", "cohere", "cohere2", "olmo"}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("each", few_of(FAMILIES, is_kind), ids=lambda each: each.name)
def test_a_stage_that_is_replayed_gives_what_the_unmodified_model_gives(each: Any, stage: int) -> None:
    config = build_config(each)
    config.use_cache = config.get_text_config().use_cache = False
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    units = find_units(model)
    bounds = split_stages((1, sum(unit.is_layer for unit in units) - 1))[stage]
    hollow_out(model, units, bounds, find_layer_outputs(config), torch.float32)
    part, unmodified = StageModel(model, units, bounds), model.forward
    replayed = part.replay()
    assert replayed is not None
    replaying = model.forward
    for step in range(3):
        hidden = torch.randn(*SHAPE, config.get_text_config().hidden_size, requires_grad=True)
        received = () if bounds.is_first else (hidden,)
        outputs, gradients = [], []
        for forward in (replaying, unmodified):
            model.forward = forward  # type: ignore[method-assign]
            (output,) = part(received, input_ids=tokens_of(step), use_cache=False)
            outputs.append(output.logits if bounds.is_last else output)
            outputs[-1].float().square().sum().backward()
            gradients.append([p.grad for p in model.parameters() if p.grad is not None] + [hidden.grad])
            model.zero_grad()
            hidden.grad = None
        assert torch.equal(outputs[0], outputs[1])
        for mine, theirs in zip(*gradients, strict=True):
            assert (mine is theirs is None) or torch.equal(mine, theirs)
    runs_as_it_is = NOT_WITH_HEAD | NEVER if bounds.is_last else NOT_WITH_EMBEDDING | NEVER
    assert bool(replayed.refusals) == (each.name in runs_as_it_is), replayed.refusals


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = "causal"

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None, **_: Any) -> Tensor:
        hidden_states = hidden_states + self.linear(hidden_states)
        return hidden_states if mask is None else hidden_states * mask[..., None]


class Output:
    def __init__(self, logits: Tensor):
        self.logits = logits


class Model(nn.Module):
    """A causal language model as far as a replay asks. between: its code around its layers, (model, tokens, x) -> (x, what the
    layers are given)."""

    def __init__(self, between: Callable[["Model", Tensor, Tensor], tuple[Tensor, dict[str, Any]]]):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.rotary = nn.Identity()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.table = nn.Buffer(torch.linspace(0.5, 1.5, SHAPE[1])[None])
        self.count = 0
        self._between = (between,)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
        x, constants = self._between[0](self, input_ids, self.embedding(input_ids))
        for layer in self.layers:
            x = layer(x, **constants)
        return Output(self.head(x))


def causal(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    """From shapes, buffers and constants alone."""
    positions = torch.arange(x.shape[1], device=tokens.device)[None]
    assert bool((positions.diff() == 1).all())  # transformers asks as much
    return x, {"mask": model.rotary(model.table * positions.cos()), "kind": model.layers[0].kind}


def build(between: Any) -> tuple[Model, ReplayedForward]:
    model = Model(between)
    replayed = replay_forward(model, LAYERS, begins=True, ends=True)  # type: ignore[arg-type]
    assert replayed is not None
    return model, replayed


def test_the_code_around_the_layers_runs_twice_and_never_again() -> None:
    calls: list[int] = []

    def between(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        calls.append(1)
        return causal(model, tokens, x)

    model, replayed = build(between)
    for step in range(4):
        output = model(input_ids=tokens_of(step))
        assert isinstance(output, CausalLMOutput) == (step > 0)
        assert torch.equal(output.logits, Model(causal)(tokens_of(step)).logits)
    assert len(calls) == 2
    assert not replayed.refusals


def test_each_shape_and_mode_has_a_chain_of_its_own() -> None:
    model, _ = build(lambda model, tokens, x: (x, {"mask": torch.linspace(0, 1 + model.training, tokens.shape[1])}))
    stock = Model(lambda model, tokens, x: (x, {"mask": torch.linspace(0, 1 + model.training, tokens.shape[1])}))
    for is_training in (True, False) * 2:
        for shape in ((2, 6), (2, 5), (1, 6)) * 2:
            found = model.train(is_training)(input_ids=tokens_of(0, shape))
            assert torch.equal(found.logits, stock.train(is_training)(tokens_of(0, shape)).logits)


def reads_a_token(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x, {"mask": torch.ones(1, SHAPE[1]) * (2 if tokens[0, 0] >= 0 else 1)}


def reads_through_a_list(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x, {"mask": torch.tensor([[float(each >= 0) for each in tokens[0].tolist()]])}


def masks_a_token(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x, {"mask": (tokens >= 0).float()}


def writes_into_a_constant(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x, {"mask": torch.ones(SHAPE).masked_fill_(tokens < 0, 0.0)}


def copies_into_a_constant(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    mask = torch.ones(SHAPE)
    mask[:, 0] = (tokens[:, 0] >= 0).float()
    return x, {"mask": mask}


def reads_hidden_states(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x, {"mask": (x.detach().sum(-1).isfinite()).float()}


def scales(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x * 2.0, {}


def scales_in_place(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x.mul_(2.0), {}


def reads_a_weight(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x, {"mask": model.embedding.weight.detach()[: SHAPE[1], 0][None]}


def reads_a_layers_weight(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x, {"mask": model.layers[1].linear.bias.detach()[: SHAPE[1]][None]}  # type: ignore[union-attr, index]


LEARNED = nn.Parameter(torch.ones(1, SHAPE[1]))


def reads_what_is_learned_elsewhere(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x, {"mask": LEARNED * 1.0}


def hands_on_the_embedding(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x, {"residual": x}


def counts(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    model.count += 1
    return x, {}


def learns_a_buffer(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    model.table.add_(0.0)
    return x, {"mask": model.table}


def drops_at_random(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x, {"mask": torch.rand(1, SHAPE[1]).ge(-1).float()}


def drops_by_python(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x, {"mask": torch.ones(1, SHAPE[1]) * (random.random() >= 0)}


def drops_by_numpy(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x, {"mask": torch.ones(1, SHAPE[1]) * float(np.random.uniform() >= 0)}


def shares_a_dict(model: Model, tokens: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
    return x, {"shared": {}}


REFUSED = [
    reads_a_token, reads_through_a_list, masks_a_token, writes_into_a_constant, copies_into_a_constant, reads_hidden_states,
    scales, scales_in_place, reads_a_weight, reads_a_layers_weight,
    reads_what_is_learned_elsewhere, hands_on_the_embedding, counts, learns_a_buffer, drops_at_random, drops_by_python,
    drops_by_numpy, shares_a_dict,
]  # fmt: skip


@pytest.mark.parametrize("between", REFUSED, ids=lambda each: each.__name__)
def test_what_may_depend_on_data_is_not_replayed(between: Any) -> None:
    states = []
    for is_replayed in (True, False):
        torch.manual_seed(0), random.seed(0), np.random.seed(0)
        model = Model(between)
        replayed = replay_forward(model, LAYERS, begins=True, ends=True) if is_replayed else None  # type: ignore[arg-type]
        for step in range(3):
            assert isinstance(model(input_ids=tokens_of(step)), Output)
        assert replayed is None or len(replayed.refusals) == 1
        states.append((torch.rand(1).item(), random.random(), np.random.uniform()))
    assert states[0] == states[1]


def test_code_behind_the_head_is_not_left_out() -> None:
    class Capped(Model):
        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Output:
            return Output(super().forward(input_ids).logits.tanh())

    model = Capped(causal)
    replayed = replay_forward(model, LAYERS, begins=True, ends=True)  # type: ignore[arg-type]
    assert replayed is not None
    assert all(isinstance(model(input_ids=tokens_of(step)), Output) for step in range(2))
    assert replayed.refusals


def test_a_layer_that_writes_to_its_mask_is_not_replayed() -> None:
    model, replayed = build(causal)

    def write(layer: nn.Module, args: Any, kwargs: dict[str, Tensor], output: Tensor) -> None:
        kwargs["mask"].add_(0)

    model.layers[0].register_forward_hook(write, with_kwargs=True)
    model(input_ids=tokens_of(0))
    assert isinstance(model(input_ids=tokens_of(1)), Output)
    assert replayed.refusals


def test_a_constant_that_was_written_to_later_is_not_used_again() -> None:
    model, _ = build(causal)
    model(input_ids=tokens_of(0))
    given: list[Tensor] = []
    handle = model.layers[0].register_forward_pre_hook(
        lambda layer, args, kwargs: given.append(kwargs["mask"]), with_kwargs=True
    )
    assert isinstance(model(input_ids=tokens_of(1)), CausalLMOutput)
    handle.remove()
    given[0].zero_()
    output = model(input_ids=tokens_of(2))
    assert torch.equal(output.logits, Model(causal)(tokens_of(2)).logits)


def test_hooks_of_the_modules_between_are_heard() -> None:
    model, _ = build(causal)
    model(input_ids=tokens_of(0))
    heard: list[int] = []
    model.rotary.register_forward_hook(lambda *_: heard.append(1))
    model(input_ids=tokens_of(1))
    assert heard == [1]


def test_hooks_of_the_modules_of_the_chain_see_every_call_once() -> None:
    model, _ = build(causal)
    heard: list[nn.Module] = []
    for module in (model, model.embedding, *model.layers, model.head):
        module.register_forward_hook(lambda module, *_: heard.append(module))
    for step in range(3):
        model(input_ids=tokens_of(step))
    assert heard == [model.embedding, *model.layers, model.head, model] * 3


def test_other_tensors_than_tokens_are_the_models_own_business() -> None:
    model, _ = build(causal)
    mask = torch.ones(SHAPE)
    for step in range(3):
        assert isinstance(model(input_ids=tokens_of(step), attention_mask=mask), Output)


@torch.no_grad()
def test_a_change_in_place_between_modules_is_seen_without_gradients_too() -> None:
    model, replayed = build(scales_in_place)
    assert all(isinstance(model(input_ids=tokens_of(step)), Output) for step in range(2))
    assert replayed.refusals


def test_stray_parameters_are_left_to_the_model() -> None:
    model = Model(causal)
    model.layers.bias = nn.Parameter(torch.ones(WIDTH))  # type: ignore[assignment]
    assert replay_forward(model, LAYERS, begins=True, ends=True) is None  # type: ignore[arg-type]
