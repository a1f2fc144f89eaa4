"""Initial values: a unit is drawn by its family's initialiser from a seed of its own, and ranks cut what they own from it."""

from collections.abc import Callable, Collection

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, PreTrainedModel

from framework.errors import ModelError
from framework.model.initial import draw_unit, refuse_uninitialised
from framework.model.load import build_meta, load_config
from framework.model.units import Unit, find_units
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from framework.train.build import materialize
from framework.verify.compare import compare_initial
from framework.verify.layout import initial_weights
from tests.families import FAMILIES, build_config, family, skip_without_initial_values
from tests.grid import few_of
from tests.ranks.parity import CPU

SEED = 7
BATCH = ("batch.sequences_per_step=16", "batch.sequences_per_microbatch=2", "batch.context=64")
# Between them all kinds of writes: stacked experts, scaled projections, sinks, logarithms of a state space, padding rows, numbers
# of a constructor alone.
VARIED = ("llama", "gpt2", "gemma2", "deepseek_v3", "gpt_oss", "qwen3_next", "xglm", "mixtral", "apertus")


def draw_layer(model: PreTrainedModel, seed: int = SEED) -> dict[str, Tensor]:
    layer = next(unit for unit in find_units(model) if unit.name == "layers.1")
    return draw_unit(model, layer, seed, CPU)


@pytest.mark.parametrize("name", few_of([each.name for each in FAMILIES], VARIED.__contains__))
def test_values_are_distributed_as_hugging_face_draws_them(name: str) -> None:
    """Scales of the depth, padding rows, sinks and logarithms of a state space included."""
    skip_without_initial_values(name)
    config = build_config(family(name))
    assert max(compare_initial(initial_weights(config, SEED), config).values()) <= 1


def test_values_depend_on_seed_and_unit_alone() -> None:
    """Not on how many layers there are, on the model's dtype or on torch's RNG, which stays as it is."""
    config = build_config(family("llama"))
    state, values = torch.get_rng_state(), draw_layer(build_meta(config))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(SEED + 1)
    deeper = draw_layer(build_meta(build_config(family("llama"), num_hidden_layers=5), dtype=torch.bfloat16))
    other, first = draw_layer(build_meta(config), SEED + 1), initial_weights(config, SEED)
    for name, value in values.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, deeper[name])
        if "norm" not in name:
            assert not torch.equal(value, other[name])
            assert not torch.equal(value, first[name.replace("layers.1", "layers.0")])


def test_drawing_leaves_the_model_on_meta() -> None:
    model = build_meta(build_config(family("gpt2")))
    before = dict(model.named_parameters(remove_duplicate=False))
    for unit in find_units(model):
        draw_unit(model, unit, SEED, CPU)
    after = dict(model.named_parameters(remove_duplicate=False))
    assert all(after[name] is parameter and parameter.is_meta for name, parameter in before.items())


class TwoLayers(nn.Module):
    """Enough of a pretrained model for `draw_unit`, with a bias that is tied within the unit."""

    def __init__(self, initialise: Callable[[nn.Module], None]):
        super().__init__()
        with torch.device("meta"):
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.bias = self.first.bias
        self.config = build_config(family("llama"))
        self._init_weights = initialise

    def draw(self) -> dict[str, Tensor]:
        unit = Unit(
            "embedding", ("first", "second", ""), ("first.weight", "first.bias", "second.weight", "second.bias")
        )
        return draw_unit(self, unit, SEED, CPU)


def plain(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        module.weight.normal_()
        module.bias.zero_()


def test_a_parent_may_write_to_its_childrens_parameters_and_to_tied_ones() -> None:
    """As GPT-2 does to c_proj and BERT's head to its decoder's bias; here after it has read them."""

    def initialise(module: nn.Module) -> None:
        plain(module)
        if isinstance(module, TwoLayers):
            module.bias[::2].fill_(3)
            module.second.weight.normal_(0, 5)
            module.second.bias.copy_(module.first.weight.sum(0))
            nn.init.orthogonal_(module.first.weight)

    values = TwoLayers(initialise).draw()
    assert values["first.bias"].tolist() == [3, 0] * 3
    assert 3 < values["second.weight"].std() < 7
    torch.testing.assert_close(values["first.weight"] @ values["first.weight"].T, torch.eye(6))
    assert not torch.equal(values["second.bias"], torch.zeros(6))


def test_an_initialiser_may_put_another_parameter_there() -> None:
    def initialise(module: nn.Module) -> None:
        plain(module)
        if isinstance(module, TwoLayers):
            module.second.weight = nn.Parameter(torch.ones(6, 6))

    model = TwoLayers(initialise)
    assert torch.equal(model.draw()["second.weight"], torch.ones(6, 6))
    assert model.second.weight.is_meta


def test_elements_that_nobody_writes_are_an_error() -> None:
    """A factor writes nothing."""

    def initialise(module: nn.Module) -> None:
        plain(module)
        if isinstance(module, TwoLayers):
            module.second.weight.copy_(torch.full((6, 6), torch.nan))
            module.second.weight[:5].zero_()
            module.second.weight.mul_(2)

    with pytest.raises(ModelError, match=r"no initialiser for second\.weight"):
        TwoLayers(initialise).draw()


def test_a_family_without_initialiser_is_refused_by_a_small_copy() -> None:
    config = AutoConfig.for_model("openai-gpt", vocab_size=97, n_embd=32, n_layer=2, n_head=2)
    for find in (lambda: refuse_uninitialised(config), lambda: initial_weights(config, SEED)):
        with pytest.raises(ModelError, match=r"no initialiser for transformer\.h\.0\.attn\.c_attn\.weight"):
            find()
    refuse_uninitialised(build_config(family("llama")))


class LargestTensor(TorchDispatchMode):
    """Elements of the largest fp32 tensor that operations make."""

    numel = 0

    def __torch_dispatch__(self, func: object, types: Collection[type], args: tuple = (), kwargs: dict | None = None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_meta and result.dtype == torch.float32:
            self.numel = max(self.numel, result.untyped_storage().nbytes() // result.element_size())
        return result


def test_a_rank_of_zero_3_has_one_parameter_of_a_unit_whole_and_keeps_its_part() -> None:
    recipe = compose(["model=tiny_llama", "zero=stage_3", "precision=bf16", "launch.ranks=8", *BATCH]).require()
    plan = make_plan(recipe, load_config(recipe.model))
    with LargestTensor() as largest:
        buffers = materialize(plan, {}, plan.of_rank(5).stages[0], CPU, resumes=False, masters=[])
    assert largest.numel == max(parameter.numel() for parameter in plan.whole.parameters())
    whole = initial_weights(plan.config, recipe.train.seed)
    for buffer in buffers:
        for slot in buffer.slots:
            layout, held = buffer.held(slot, buffer.master)
            boxes = [whole[slot.name][box.slices()].flatten() for box in layout.boxes()]
            assert torch.equal(held, torch.cat([held[:0], *boxes]))
