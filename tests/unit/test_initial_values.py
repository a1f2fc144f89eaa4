"""Initial values: recorded or run they are the same, any rank's part is cut from one tensor, and they are the family's."""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from framework.errors import ModelError
from framework.mesh.box import Box
from framework.mesh.layout import Layout, Shard, part
from framework.model.counter_rng import CHUNK_CPU
from framework.model.initial import Apply, Constant, Copy, Normal, Program
from framework.model.load import build_meta, load_config
from framework.model.materialize import initialize_unit
from framework.model.record import Initialiser, Recorder, Unrecordable, record
from framework.model.units import find_units
from framework.plan.plan import make_plan
from framework.recipe.compose import compose
from framework.train.build import materialize
from tests.families import FAMILIES, build_config, family

SEED = 7
BATCH = ("batch.sequences_per_step=16", "batch.sequences_per_microbatch=2", "batch.context=64")
# apertus has no initialiser for the parameters of its activation.
INITIALISED = [each.name for each in FAMILIES if each.name != "apertus"]
# Between them all kinds of writes: stacked experts, scaled projections, sinks, logarithms of a state space, padding rows.
VARIED = ("llama", "gpt2", "gemma2", "deepseek_v3", "gpt_oss", "qwen3_next", "xglm", "mixtral")


def programs_of(name: str, **changes: object) -> dict[str, Program]:
    return programs_in(build_meta(build_config(family(name), **changes)))


def programs_in(model: PreTrainedModel) -> dict[str, Program]:
    programs: dict[str, Program] = {}
    for unit in find_units(model):
        programs |= initialize_unit(model, unit, SEED, unit.parameters)
    return programs


def refuse(recorder: Recorder, target: Tensor, operation: object) -> None:
    """In place of `Recorder._note`: nothing can be recorded."""
    raise Unrecordable


def counting(ran: list[str]) -> Callable[..., None]:
    """`Recorder.execute` that adds to a list what it runs."""
    execute = Recorder.execute

    def count(recorder: Recorder, path: str, *rest: Any) -> None:
        ran.append(path)
        execute(recorder, path, *rest)

    return count


@pytest.mark.parametrize(
    "name", [name if name in VARIED else pytest.param(name, marks=pytest.mark.grid) for name in INITIALISED]
)
def test_a_family_is_recorded_as_it_runs(name: str) -> None:
    model, ran = build_meta(build_config(family(name))), list[str]()
    with patch.object(Recorder, "execute", counting(ran)):
        recorded = programs_in(model)
    assert not ran
    with patch.object(Recorder, "_note", refuse):
        executed = programs_in(model)
    assert recorded.keys() == executed.keys()
    assert all(isinstance(program.steps[0][0], Copy) for program in executed.values())
    for parameter, program in recorded.items():
        assert torch.equal(program.whole(), executed[parameter].whole()), parameter


@pytest.mark.parametrize(
    "name", ["llama", "gpt2", "mixtral", "gemma2", "deepseek_v3", "qwen3_next", "gpt_neox", "xglm"]
)
def test_values_are_distributed_as_hugging_face_draws_them(name: str) -> None:
    """Constants are equal; means and deviations are, within 5 standard errors of two samples."""
    torch.manual_seed(SEED)
    stock = AutoModelForCausalLM.from_config(build_config(family(name)))
    programs = programs_of(name)
    for parameter, theirs in stock.named_parameters():
        ours = programs[parameter].whole()
        if theirs.unique().numel() == 1:
            assert torch.equal(ours, theirs), parameter
            continue
        error = (2 / theirs.numel()) ** 0.5
        kurtosis = 3.0  # of the normal distribution, the largest here
        assert abs(ours.mean() - theirs.mean()) < 5 * theirs.std() * error, parameter
        assert abs(ours.std() / theirs.std() - 1) < 5 * ((kurtosis - 1) / 4) ** 0.5 * error, parameter


def test_a_value_depends_on_seed_and_name_alone() -> None:
    """Not on what is drawn with it, nor on how many layers there are."""
    model = build_meta(build_config(family("llama")))
    layer = next(unit for unit in find_units(model) if unit.name == "layers.1")
    name = layer.parameters[0]
    lone = initialize_unit(model, layer, SEED, [name])
    assert list(lone) == [name]
    assert torch.equal(lone[name].whole(), programs_of("llama", num_hidden_layers=5)[name].whole())
    assert not torch.equal(lone[name].whole(), initialize_unit(model, layer, SEED + 1, [name])[name].whole())


def test_any_part_is_cut_from_the_whole() -> None:
    """Shards with segments, intervals of them, and every dtype of a master."""
    for name in ("xglm", "gpt_oss", "qwen3_next"):
        for program in programs_of(name).values():
            whole = program.whole()
            for layout in layouts_of(whole.shape):
                boxes = layout.boxes()
                expected = torch.cat([whole[:0].flatten(), *(whole[box.slices()].flatten() for box in boxes)])
                for dtype in (torch.float32, torch.bfloat16, torch.float64):
                    out = torch.empty(len(expected), dtype=dtype)
                    program.write(boxes, out)
                    assert torch.equal(out, expected.to(dtype))


def layouts_of(shape: torch.Size) -> Iterator[Layout]:
    """A third of the tensor, unsharded and as the second of two shards of each dim, once with segments."""
    yield Layout(tuple(shape), interval=part(shape.numel(), 1, 3))
    for dim, size in enumerate(shape):
        for segments in ((), (size // 3, size - size // 3)):
            layout = Layout(tuple(shape), (Shard("tp", dim, 1, 2, segments),))
            yield Layout(tuple(shape), layout.shards, interval=part(layout.numel_local, 1, 3))


def normal_but_a_row(module: nn.Module) -> None:
    module.weight.normal_(0.0, 0.02)
    module.weight[3].zero_()


def truncated(module: nn.Module, low: float = -0.03) -> None:
    nn.init.trunc_normal_(module.weight, std=0.02, a=low, b=0.05)


def in_two_parts(module: nn.Module) -> None:
    module.weight[:4].uniform_(-1.0, 3.0)
    module.weight[4:, :].fill_(2)


def scaled(module: nn.Module) -> None:
    nn.init.kaiming_uniform_(module.weight)
    module.weight.mul_(0.3).add_(1).clamp_(min=0.9)


def a_scaled_part(module: nn.Module) -> None:
    module.weight.data.normal_()
    module.weight.view(2, -1)[1:].mul_(0.3)


def computed(module: nn.Module) -> None:
    module.weight.copy_(torch.rand(10).log())
    module.weight[0].copy_(torch.arange(10))


def no_number_of_fp32(module: nn.Module) -> None:
    nn.init.constant_(module.weight, 0.9)


def columns(module: nn.Module) -> None:
    module.weight.zero_()
    module.weight[2:5, 3:7].uniform_()


def orthogonal(module: nn.Module) -> None:
    nn.init.orthogonal_(module.weight)


def by_what_it_drew(module: nn.Module) -> None:
    module.weight.normal_()
    if module.weight.std() > 0:
        module.weight.mul_(2)


def strided(module: nn.Module) -> None:
    module.weight.T.normal_()
    module.weight[::2].fill_(1)


def after_a_draw(module: nn.Module) -> None:
    """As RWKV's does. On meta orthogonal_ returns and says nothing."""
    module.weight.normal_()
    nn.init.orthogonal_(module.weight)


def copied(module: nn.Module) -> None:
    module.weight.copy_(torch.zeros_like(module.weight))


def identity(module: nn.Module) -> None:
    nn.init.eye_(module.weight)


def computed_in_place(module: nn.Module) -> None:
    module.weight.copy_(torch.empty(10, device=module.weight.device).uniform_(0, 16).log_())


def another_parameter(module: nn.Module) -> None:
    module.weight = nn.Parameter(torch.ones(8, 10))


RECORDED = (
    computed_in_place,
    normal_but_a_row,
    truncated,
    in_two_parts,
    scaled,
    a_scaled_part,
    computed,
    no_number_of_fp32,
    columns,
)
EXECUTED = (
    another_parameter,
    after_a_draw,
    copied,
    orthogonal,
    by_what_it_drew,
    strided,
    identity,
    partial(truncated, low=0.04),
)


def record_weight(initialiser: Initialiser) -> tuple[Program, bool]:
    """The program of a weight of 8 x 10, and whether it was recorded."""
    with torch.device("meta"):
        module = nn.Linear(10, 8, bias=False)
    ran: list[str] = []
    with patch.object(Recorder, "execute", counting(ran)):
        program = record(SEED, {"weight": module.weight}, {"": (module, initialiser)})["weight"]
    assert module.weight.is_meta
    assert program.is_complete
    return program, not ran


@pytest.mark.parametrize("initialiser", RECORDED, ids=lambda each: each.__name__)
def test_elementwise_writes_are_recorded(initialiser: Initialiser) -> None:
    program, was_recorded = record_weight(initialiser)
    assert was_recorded
    with patch.object(Recorder, "_note", refuse):
        executed, _ = record_weight(initialiser)
    assert torch.equal(program.whole(), executed.whole())
    boxes = [Box((1, 0), (5, 7)), Box((0, 9), (8, 1)), Box((7, 3), (1, 2))]
    expected = torch.cat([program.whole()[box.slices()].flatten() for box in boxes])
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        out = torch.empty(sum(box.numel for box in boxes), dtype=dtype)
        program.write(boxes, out)
        assert torch.equal(out, expected.to(dtype)), dtype


@pytest.mark.parametrize("initialiser", EXECUTED, ids=lambda each: getattr(each, "__name__", "truncated in the tail"))
def test_what_is_no_program_is_run(initialiser: Initialiser) -> None:
    program, was_recorded = record_weight(initialiser)
    assert not was_recorded
    assert torch.equal(program.whole(), record_weight(initialiser)[0].whole())  # whatever was drawn before
    weight = program.whole()
    if initialiser in (orthogonal, after_a_draw):
        torch.testing.assert_close(weight @ weight.T, torch.eye(8))
    if initialiser is identity:
        assert torch.equal(weight, torch.eye(8, 10))


def test_a_parent_may_write_to_its_childrens_parameters() -> None:
    """As GPT-2 does to c_proj, and here after it has read them."""
    with torch.device("meta"):
        parent = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))

    def plain(module: nn.Module) -> None:
        module.weight.normal_()
        module.bias.zero_()

    def tie(module: nn.Module) -> None:
        module[1].weight.normal_(0, 5)
        module[1].bias.copy_(module[0].weight.sum(0))

    modules = {"0": (parent[0], plain), "1": (parent[1], plain), "": (parent, tie)}
    programs = record(SEED, dict(parent.named_parameters()), modules)
    values = {name: program.whole() for name, program in programs.items()}
    assert isinstance(programs["0.weight"].steps[0][0], Normal)
    assert torch.equal(values["1.bias"], values["0.weight"].sum(0))
    assert 3 < values["1.weight"].std() < 7


def test_a_tied_parameter_is_run_under_all_its_names() -> None:
    """As BERT's head holds its decoder's bias. What lies outside of the module cannot be."""
    with torch.device("meta"):
        parent = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    parent.register_parameter("bias", parent[0].bias)

    def uneven(module: nn.Module) -> None:
        module.bias[::2].fill_(3)
        module.bias[1::2].copy_(module.bias[::2] * 2)

    values = record(SEED, {"bias": parent.bias}, {"0": (parent[0], uneven)})["bias"].whole()
    assert values.tolist() == [3, 6] * 3
    assert parent[0].bias is parent.bias
    with pytest.raises(ModelError, match=r"initialiser of 1 writes to bias, outside of it"):
        record(SEED, {"bias": parent.bias}, {"1": (parent[1], lambda _: uneven(parent))})


def test_truncated_values_are_those_of_the_truncated_normal_distribution() -> None:
    with torch.device("meta"):
        module = nn.Linear(1 << 9, 1 << 9)

    def initialise(each: nn.Module) -> None:
        nn.init.trunc_normal_(each.weight, std=0.02, a=-0.04, b=0.04)

    program = record(SEED, {"weight": module.weight}, {"": (module, initialise)})["weight"]
    values = (program.whole().flatten() / 0.02).double()
    assert values.abs().max() <= 2
    inside = 2 * torch.special.ndtr(torch.tensor(2.0, dtype=torch.float64)) - 1
    ranked = ((torch.special.ndtr(values) - (1 - inside) / 2) / inside).sort().values
    steps = torch.arange(len(ranked) + 1, dtype=torch.float64) / len(ranked)
    assert torch.maximum((steps[1:] - ranked).max(), (ranked - steps[:-1]).max()) * len(ranked) ** 0.5 < 1.95


def test_a_program_is_complete_once_all_is_written() -> None:
    """Several regions may do it together; a factor writes nothing, and NaN in a copy is what nobody wrote."""
    program = Program((4, 6)).then(Constant(1.0), Box((0, 0), (4, 3))).then(Constant(1.0), Box((1, 2), (3, 4)))
    assert not program.is_complete
    assert not program.then(Apply(torch.ops.aten.mul_.Tensor, (2.0,))).is_complete
    assert program.then(Constant(2.0), Box((0, 3), (1, 3))).is_complete
    holed = Program((4, 6)).then(Copy(torch.full((4, 6), torch.nan)))
    assert not holed.is_complete
    assert holed.then(Constant(0.0), Box((0, 0), (4, 6))).is_complete
    assert Program((0, 3)).is_complete


def test_a_parameter_without_initialiser_is_an_error() -> None:
    with pytest.raises(ModelError, match=r"no initialiser for model\.layers\.0\.mlp\.act_fn\.alpha_p"):
        programs_of("apertus")


class LargestTensor(TorchDispatchMode):
    """Elements of the largest fp32 or int32 tensor that operations make."""

    numel = 0

    def __torch_dispatch__(self, func: object, types: Collection[type], args: tuple = (), kwargs: dict | None = None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not result.is_meta and result.dtype in (torch.float32, torch.int32):
            self.numel = max(self.numel, result.untyped_storage().nbytes() // result.element_size())
        return result


@pytest.fixture
def one_thread() -> Iterator[None]:
    """A mode sees no other threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_part_takes_no_memory_but_its_own_and_a_chunk(one_thread: None) -> None:
    """An eighth of a weight of 32 chunks, as ZeRO or tensor parallelism keeps it."""
    shape = (8 * 32, CHUNK_CPU // 8)
    with torch.device("meta"):
        module = nn.Linear(shape[1], shape[0], bias=False)
    program = record(SEED, {"weight": module.weight}, {"": (module, normal_but_a_row)})["weight"]
    for layout in (Layout(shape, interval=(0, 4 * CHUNK_CPU)), Layout(shape, (Shard("tp", 1, 3, 8),))):
        for dtype in (torch.float32, torch.bfloat16):
            with LargestTensor() as largest:
                out = torch.empty(layout.numel_owned, dtype=dtype)
                program.write(layout.boxes(), out)
            assert out.std() > 0.019
            assert largest.numel == (4 if dtype == torch.float32 else 1) * CHUNK_CPU


def test_a_rank_of_zero_3_holds_no_whole_unit(one_thread: None) -> None:
    """From recipe to values: what it makes in fp32 is its masters and gradients, and chunks."""
    recipe = compose(["model=tiny_llama", "zero=stage_3", "precision=bf16", "launch.ranks=8", *BATCH]).require()
    plan = make_plan(recipe, load_config(recipe.model))
    with LargestTensor() as largest:
        buffers = materialize(plan, {}, plan.of_rank(5).stages[0], torch.device("cpu"), resumes=False, masters=[])
    assert largest.numel == max(buffer.plan.numel_owned for buffer in buffers) > CHUNK_CPU
    assert all(0.01 < buffer.master.std() < 0.3 for buffer in buffers if buffer.plan.unit != "head")
