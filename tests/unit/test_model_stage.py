"""A stage's own copy of a model on meta: what a fresh build cut the same way has, and nothing of the whole model's."""

import gc
import weakref
from time import perf_counter
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig, PreTrainedModel

from framework.model.load import build_meta, load_config
from framework.model.stage import PassThrough, StageBounds, copy_stage, hollow_out, own_ties, own_units, split_stages
from framework.model.units import Unit, find_units, tied_names
from framework.recipe.compose import compose
from tests.families import FAMILIES, Family, build_config, family, is_kind
from tests.grid import few_of

# Stages of three layers: the first, one in the middle, the last; and the whole model as the only one.
STAGES = (*split_stages([1, 1, 1]), *split_stages([3]))


class NoMemory(TorchDispatchMode):
    """Fails where an operation makes a tensor that has memory, unless of one that has some (diffllama builds some on CPU)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, tuple | list) else (result,)
        has_memory = any(isinstance(each, Tensor) and not each.is_meta for each in args)
        assert has_memory or all(each.is_meta for each in made if isinstance(each, Tensor)), f"{func} allocates"
        return result


def cut_in_place(model: PreTrainedModel, units: list[Unit], bounds: StageBounds) -> PreTrainedModel:
    """The long way: a model of its own, whose other layers are replaced."""
    for unit in units:
        if unit.is_layer and not bounds.owns(unit):
            parent, _, name = unit.root.rpartition(".")
            model.get_submodule(parent)._modules[name] = PassThrough(None)
    return model


def describe(model: PreTrainedModel) -> dict[str, Any]:
    """All that two models must have alike: modules, parameters, buffers, which names are one parameter, the config."""
    parameters = list(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}
    return {
        "modules": [(name, type(each), each.training) for name, each in model.named_modules(remove_duplicate=False)],
        "parameters": [(name, tuple(p.shape), p.dtype, p.requires_grad, p.device.type) for name, p in parameters],
        "ties": [(name, first.setdefault(id(p), name)) for name, p in parameters],
        "buffers": [(name, tuple(b.shape), b.dtype, b.device.type) for name, b in model.named_buffers()],
        "state": list(model.state_dict()),
        "declared ties": dict(model.all_tied_weights_keys),
        "config": model.config.to_dict(),
    }


def reachable(model: PreTrainedModel) -> dict[int, Any]:
    """The modules, tensors and configs that can be reached from the model through any attribute, by id."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo: list[Any] = [model]
    while todo:
        each = todo.pop()
        if id(each) in seen or isinstance(each, type | ModuleType):
            continue
        seen.add(id(each))
        if isinstance(each, nn.Module | Tensor | PreTrainedConfig):
            found[id(each)] = each
        todo += _referents(each)
    return found


def _referents(each: Any) -> list[Any]:
    if isinstance(each, weakref.ref):
        return [each()]
    if isinstance(each, FunctionType):  # what it encloses, not its module's globals
        return [cell.cell_contents for cell in each.__closure__ or ()]
    return gc.get_referents(each)


@pytest.mark.parametrize("tiny", few_of(FAMILIES, is_kind), ids=lambda tiny: tiny.name)
def test_a_copy_has_what_a_fresh_build_cut_the_same_way_has(tiny: Family):
    whole = build_meta(build_config(tiny))
    units, before = find_units(whole), describe(whole)
    for bounds in STAGES:
        with NoMemory():
            copied = copy_stage(whole, units, bounds, False)
        assert describe(copied) == describe(cut_in_place(build_meta(build_config(tiny)), units, bounds))
    assert describe(whole) == before


@pytest.mark.parametrize(
    "tiny", few_of(FAMILIES, lambda tiny: tiny.name in ("gemma2", "deepseek_v3", "gpt_oss")), ids=lambda tiny: tiny.name
)
def test_a_copy_shares_nothing_with_the_whole_model(tiny: Family):
    whole = build_meta(build_config(tiny))
    own = reachable(whole)
    for bounds in (STAGES[1], STAGES[-1]):
        shared = reachable(copy_stage(whole, find_units(whole), bounds, False)).keys() & own.keys()
        assert not [own[each] for each in shared]


def test_what_is_set_on_a_copy_does_not_show_in_the_whole_model():
    whole = build_meta(build_config(family("deepseek_v3")))
    copied = copy_stage(whole, find_units(whole), STAGES[2], False)
    copied.config.vocab_size = 1
    copied.set_experts_implementation("eager")
    copied.model.layers[2].mlp.marked = True
    assert whole.config.vocab_size == 97
    assert whole.config._experts_implementation != "eager"
    assert not any("marked" in vars(module) for module in whole.modules())


def test_a_copy_without_what_other_stages_own_has_the_stages_parameters():
    tiny = build_config(family("gemma2"))
    whole = build_meta(tiny)
    units, ties = find_units(whole), tied_names(whole)
    for bounds in STAGES:
        model = copy_stage(whole, units, bounds, False)
        hollow_out(model, units, bounds, torch.float32)
        own = {name for unit in own_units(units, ties, bounds) for name in unit.parameters}
        assert own == own_ties(model, ties).keys()


@pytest.mark.grid
def test_a_copy_costs_less_than_a_build():
    """DeepSeek-V3 on 16 stages, one of those in the middle."""
    config = load_config(compose(["model=deepseek_v3"]).require().model)
    whole = build_meta(config)
    units, bounds = find_units(whole), split_stages([3] + [4] * 14 + [2])[8]

    def seconds(make: Any) -> float:
        start = perf_counter()
        make()
        return perf_counter() - start

    copied = min(seconds(lambda: copy_stage(whole, units, bounds, False)) for _ in range(3))
    built = min(seconds(lambda: build_meta(config)) for _ in range(3))
    assert copied < built, (copied, built)
