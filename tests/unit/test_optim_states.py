"""Moments in bf16 and int8: chunk by chunk, exact where they must be, and how far from fp32 they are."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from framework.mesh.layout import Layout, Shard
from framework.optim import states
from framework.optim.low_bit import BLOCK
from framework.optim.optimizers import FlatOptimizer, Missed, state_names
from framework.optim.states import CHUNK_CPU, MomentsDtype, count_state_bytes
from framework.optim.update_rules import FlatShard, ShardGroup
from framework.recipe.schema import Optim

CPU = torch.device("cpu")
ONE, NO = torch.ones((), dtype=torch.float64), torch.tensor(False)
SHAPES = {"w": (37, 130), "b": (19,)}
CASES = [("adamw", "bf16"), ("adamw", "int8"), ("lion", "bf16"), ("sgd", "bf16"), ("sgd", "int8")]
EACH = pytest.mark.parametrize(("name", "moments"), CASES)
LOW = pytest.mark.parametrize("moments", ["bf16", "int8"])


def gradient_of(parameter: str, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(17 * step + len(parameter))
    gradient = torch.randn(SHAPES[parameter], generator=generator)
    return gradient * torch.logspace(-6, 0, len(gradient))[:, None] if gradient.ndim == 2 else gradient


def owned(tensor: Tensor, layout: Layout) -> Tensor:
    return torch.cat([tensor[box.slices()].flatten() for box in layout.boxes()])


class Held:
    """An optimizer over one shard that has what `layouts` own of each parameter; parameters start at 1."""

    def __init__(
        self,
        optim: Optim,
        moments: MomentsDtype,
        layouts: dict[str, Layout] | None = None,
        dtype: torch.dtype = torch.float32,
    ):
        self.optim = optim
        self.layouts = layouts or {name: Layout(shape) for name, shape in SHAPES.items()}
        number = sum(layout.numel_owned for layout in self.layouts.values())
        value, gradient = torch.ones(number, dtype=dtype), torch.zeros(number, dtype=dtype)
        self.shard = FlatShard(tuple(self.layouts.values()), value, gradient, tuple(self.layouts))
        self.optimizer = FlatOptimizer(
            optim.name, optim, [ShardGroup("default", (self.shard,), 1.0, 0.0)], CPU, moments, seed=5
        )

    def step(self, step: int, skip: Tensor = NO) -> None:
        self.fill_gradient([gradient_of(name, step) for name in self.layouts])
        self.optimizer.step(1e-2, ONE, skip, step)

    def fill_gradient(self, gradients: Sequence[Tensor]) -> None:
        parts = [owned(each, layout) for each, layout in zip(gradients, self.layouts.values(), strict=True)]
        self.shard.gradient.copy_(torch.cat(parts))

    def by_parameter(self, flat: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.layouts, flat.split([each.numel_owned for each in self.layouts.values()]), strict=True))

    def states(self) -> dict[str, Tensor]:
        return {name: self.optimizer.state(self.shard, name).clone() for name in state_names(self.optim)}

    def memory(self) -> list[Tensor]:
        return [each.clone() for each in self.optimizer.states.memory(self.shard, 0, self.shard.value.numel())]


def make_optim(name: str, **changes: Any) -> Optim:
    return Optim(name=name, momentum=0.9 if name == "sgd" else 0.0, **changes)  # type: ignore[arg-type]


def run(
    name: str,
    moments: MomentsDtype,
    layouts: dict[str, Layout] | None = None,
    steps: int = 4,
    dtype: torch.dtype = torch.float32,
) -> Held:
    held = Held(make_optim(name), moments, layouts, dtype)
    for step in range(steps):
        held.step(step)
    return held


@contextmanager
def chunks_of(size: int) -> Iterator[None]:
    with patch.object(states, "CHUNK_CPU", size):
        yield


@EACH
def test_an_update_is_near_that_of_full_moments(name: str, moments: MomentsDtype) -> None:
    found, full = run(name, moments), run(name, "fp32")
    for key, state in found.states().items():
        expected = full.states()[key]
        # Stochastic rounding is off by one spacing at most, four times; those of bf16 are 1/128 and of int8 1/8.
        bound = {"bf16": 4 / 128, "int8": 4 / 8}[moments]
        error = (state.float() - expected).norm() / expected.norm()
        assert 0 < error < bound / 4, key
    moved, expected = found.shard.value - 1, full.shard.value - 1
    # A sign that turns is a whole update of Lion's.
    bound = {"bf16": 0.05 if name == "lion" else 0.01, "int8": 0.1}[moments]
    assert (moved - expected).norm() < bound * expected.norm()


def direction(held: Held) -> dict[str, Tensor]:
    """By parameter, what AdamW adds to it but for the learning rate and the bias correction: m / sqrt(v)."""
    found = {name: state.float() for name, state in held.states().items()}
    return held.by_parameter(found["exp_avg"] / found["exp_avg_sq"].sqrt())


# Of docs/memory.md: what a rounding is off by at most, relative to the value; first moments to nearest, second stochastically.
LARGEST_ERROR = {
    "bf16": {"exp_avg": 2.0**-8, "exp_avg_sq": 2.0**-7},
    "int8": {"exp_avg": 2.0**-4, "exp_avg_sq": 2.0**-4},
}
# And what updates of a tensor are off by, L2, when roundings of 60 steps have gathered in the moments.
GATHERED_ERROR = {"bf16": 0.01, "int8": 0.1}


@LOW
def test_a_rounding_is_within_its_bound(moments: MomentsDtype) -> None:
    held, full = run("adamw", moments, steps=1), run("adamw", "fp32", steps=1)
    for key, bound in LARGEST_ERROR[moments].items():
        expected = full.states()[key]
        of_block = torch.zeros_like(expected)
        for each, part in zip(of_block.split(BLOCK), expected.split(BLOCK), strict=True):
            each.fill_(part.abs().max())
        is_within = expected.abs() > 2.0**-15 * of_block  # what int8 has numbers for
        error = ((held.states()[key].float() - expected) / expected).abs()[is_within]
        assert 0.75 * bound < error.max() <= bound, key
        assert is_within.float().mean() > 0.9, key


@LOW
def test_updates_of_each_tensor_stay_within_a_bound(moments: MomentsDtype) -> None:
    found, full = direction(run("adamw", moments, steps=60)), direction(run("adamw", "fp32", steps=60))
    for name, expected in full.items():
        error = float((found[name] - expected).norm() / expected.norm())
        assert GATHERED_ERROR[moments] / 10 < error < GATHERED_ERROR[moments], (name, error)


@EACH
def test_chunks_change_nothing(name: str, moments: MomentsDtype) -> None:
    whole = run(name, moments)
    with chunks_of(2 * BLOCK):
        cut = run(name, moments)
    assert len(cut.optimizer.states.chunks) > 9 > len(whole.optimizer.states.chunks) == 1
    assert torch.equal(whole.shard.value, cut.shard.value)
    assert all(torch.equal(a, b) for a, b in zip(whole.states().values(), cut.states().values(), strict=True))


@EACH
def test_a_skipped_step_leaves_every_bit(name: str, moments: MomentsDtype) -> None:
    held = run(name, moments)
    before, value, updates = held.memory(), held.shard.value.clone(), held.optimizer.num_updates
    held.fill_gradient([torch.full(shape, torch.inf) for shape in SHAPES.values()])
    held.optimizer.step(1e-2, ONE, torch.tensor(True), step=9)
    assert all(torch.equal(a, b) for a, b in zip(before, held.memory(), strict=True))
    assert torch.equal(value, held.shard.value)
    assert held.optimizer.num_updates == updates


@LOW
def test_what_nobody_reached_keeps_its_moments(moments: MomentsDtype) -> None:
    held = run("adamw", moments)
    before, states_before, first = held.shard.value.clone(), held.states(), 37 * 130
    with held.optimizer.preserving([Missed(held.shard, 0, first, torch.tensor(False))]):
        held.step(9)
    for name, state in held.states().items():
        assert torch.equal(state[:first], states_before[name][:first])
        assert not torch.equal(state[first:], states_before[name][first:])
    assert torch.equal(held.shard.value[:first], before[:first])
    assert not torch.equal(held.shard.value[first:], before[first:])


def halves(dim: int) -> list[dict[str, Layout]]:
    """Two ranks of tp: both matrices in halves, and of `b` an interval each."""
    matrix, vector = SHAPES["w"], SHAPES["b"]
    shards = [(Shard("tp", dim, rank, 2),) if matrix[dim] % 2 == 0 else () for rank in range(2)]
    cuts = [(0, 2000), (2000, 37 * 130)] if matrix[dim] % 2 else [None, None]
    return [
        {
            "w": Layout(matrix, shards[rank], interval=cuts[rank]),
            "b": Layout(vector, interval=[(0, 7), (7, 19)][rank]),
        }
        for rank in range(2)
    ]


@pytest.mark.parametrize("dim", [0, 1])
@EACH
def test_layouts_agree(name: str, moments: MomentsDtype, dim: int) -> None:
    """In int8 but for numbers 14 octaves below their block's largest. In fp64, so that no kernel's rounding turns one of ours."""
    whole = run(name, moments, dtype=torch.float64)
    for layouts in halves(dim):
        part = run(name, moments, layouts, dtype=torch.float64)
        for key, values in {"value": whole.shard.value, **whole.states()}.items():
            expected = whole.by_parameter(values)
            wanted = torch.cat([owned(expected[each].view(SHAPES[each]), layouts[each]) for each in layouts])
            found = part.shard.value if key == "value" else part.states()[key]
            is_equal = (found - wanted).abs() <= 1e-12 * wanted.abs()
            assert is_equal.double().mean() > (0.98 if moments == "int8" else 1 - 1e-9), key
            assert (found - wanted).double().norm() < 1e-4 * wanted.double().norm(), key


@EACH
def test_a_checkpoint_brings_back_every_bit(name: str, moments: MomentsDtype) -> None:
    saved, resumed = run(name, moments), run(name, moments, steps=1)
    resumed.optimizer.states.open()
    for key, values in saved.states().items():
        resumed.optimizer.state(resumed.shard, key).copy_(values)
    resumed.optimizer.states.close()
    resumed.shard.value.copy_(saved.shard.value)
    resumed.optimizer.num_updates = saved.optimizer.num_updates
    assert all(torch.equal(a, b) for a, b in zip(saved.memory(), resumed.memory(), strict=True))
    for held in (saved, resumed):
        held.step(4)
    assert torch.equal(saved.shard.value, resumed.shard.value)


@pytest.mark.parametrize("dim", [0, 1])
@LOW
def test_another_layout_resumes_from_it(moments: MomentsDtype, dim: int) -> None:
    """What int8 reads into other blocks is what was saved, but for numbers far below the largest of the new block."""
    whole = run("adamw", moments)
    for layouts in halves(dim):
        part = Held(make_optim("adamw"), moments, layouts)
        part.optimizer.states.open()
        wanted = {}
        for key, values in whole.states().items():
            by_name = whole.by_parameter(values)
            wanted[key] = torch.cat([owned(by_name[name].view(SHAPES[name]), layouts[name]) for name in layouts])
            part.optimizer.state(part.shard, key).copy_(wanted[key])
        part.optimizer.states.close()
        for key, found in part.states().items():
            assert (found - wanted[key]).abs().max() <= wanted[key].abs().max() * (0 if moments == "bf16" else 2.0**-15)


@LOW
def test_a_rank_without_trained_parameters_counts_updates(moments: MomentsDtype) -> None:
    optimizer = FlatOptimizer("adamw", make_optim("adamw"), [], CPU, moments)
    optimizer.step(1e-2, ONE, NO, 0)
    optimizer.states.open()
    optimizer.states.close()
    assert optimizer.num_updates == 1


class Largest(TorchDispatchMode):
    """The most elements of a floating-point tensor that any operation has made."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and each.untyped_storage().data_ptr() not in known:
                self.numel = max(self.numel, each.untyped_storage().nbytes() // each.itemsize)
        return result


@LOW
def test_full_moments_never_exist(moments: MomentsDtype) -> None:
    number = 5 * CHUNK_CPU + 300
    shard = FlatShard((Layout((number,)),), torch.ones(number), torch.ones(number), ("w",))
    group = ShardGroup("default", (shard,), 1.0, 0.0)
    optimizer = FlatOptimizer("adamw", make_optim("adamw"), [group], CPU, moments)
    with Largest() as largest:
        optimizer.step(1e-2, ONE, NO, 0)
    assert 0 < largest.numel <= CHUNK_CPU
    held = sum(each.untyped_storage().nbytes() for each in storages(optimizer))
    assert held == 2 * count_state_bytes(moments, [(0, number)])
    assert held == 2 * (2 * number if moments == "bf16" else -(-number // BLOCK) * (BLOCK + 1))


def storages(optimizer: FlatOptimizer) -> list[Tensor]:
    assert isinstance(optimizer.states, states.LowBitStates)
    return [
        each
        for storage in optimizer.states.storages.values()
        for each in vars(storage).values()
        if isinstance(each, Tensor)
    ]


@LOW
def test_second_moments_follow_a_gradient_that_fades(moments: MomentsDtype) -> None:
    """With beta2 = 0.999 a second moment loses a thousandth of itself in a step: rounded to nearest it would never move."""
    held = Held(make_optim("adamw", betas=(0.9, 0.999)), moments)
    held.fill_gradient([torch.ones(shape) for shape in SHAPES.values()])
    held.optimizer.step(0.0, ONE, NO, 0)
    steps = 400
    for step in range(1, steps):
        held.shard.gradient.fill_(0.5)
        held.optimizer.step(0.0, ONE, NO, step)
    decayed = 0.999 ** (steps - 1)
    expected = 1e-3 * decayed + 0.25 * (1 - decayed)
    found = held.states()["exp_avg_sq"].double()
    assert abs(float(found.mean()) - expected) < 0.01 * expected


def test_a_lost_exponent_of_a_block_is_another_run() -> None:
    whole, lost = run("adamw", "int8", steps=2), run("adamw", "int8", steps=2)
    assert isinstance(lost.optimizer.states, states.LowBitStates)
    storage = lost.optimizer.states.storages["exp_avg"]
    assert isinstance(storage, states.Int8Storage)
    storage.exponents[3] = 0
    for held in (whole, lost):
        held.step(2)
    is_same = whole.shard.value == lost.shard.value
    assert not is_same[3 * BLOCK : 4 * BLOCK].any()
    assert is_same[: 3 * BLOCK].all()
    assert is_same[4 * BLOCK :].all()
