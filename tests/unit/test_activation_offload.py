"""Activation offload: what leaves, when it is copied, what waits for it, and what is left on the device."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from unittest.mock import MagicMock, call, patch

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig

from framework.comm.communicator import Communicator
from framework.comm.connect import connect
from framework.comm.transfer import CopyStream, LateCopies
from framework.errors import ModelError
from framework.mesh.topology import Axis
from framework.parallel.activation_offload import (
    ActivationOffload,
    HostPool,
    LayerPass,
    OffloadedStorage,
    choose_offloaded,
)
from framework.plan.plan import make_plan
from framework.recipe.schema import Memory, Offload, Parallel, Recipe
from framework.train.build import build
from framework.train.profiler import UnitRanges
from framework.train.step import TrainingRun, train_step
from framework.verify.evidence import make_batches
from framework.verify.layout import share
from tests.families import RECURRENT, build_config, family
from tests.grid import IN_TURN
from tests.ranks.parity import CPU, small_recipe, topology_of

pytestmark = IN_TURN

NUM_LAYERS = 4
WIDTH = 32
ROWS = 16


@pytest.mark.parametrize(
    ("fraction", "num_layers", "expected"),
    [
        (0.0, 3, ""),
        (0.1, 10, "0"),
        (0.1, 4, "0"),
        (0.5, 4, "02"),
        (0.5, 5, "013"),
        (0.7, 10, "0124578"),
        (0.9, 4, "0123"),
        (0.75, 4, "012"),
        (1.0, 3, "012"),
    ],
)
def test_offloaded_layers_are_spread_and_the_last_stays_unless_all_go(
    fraction: float, num_layers: int, expected: str
) -> None:
    found = choose_offloaded(fraction, num_layers)
    assert "".join(str(index) for index, is_offloaded in enumerate(found) if is_offloaded) == expected


class Layer(nn.Module):
    """Keeps its input, by several linear layers, views of one tensor, and what is computed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((ROWS, WIDTH), 0.5))

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(hidden_states).split(WIDTH, dim=-1)
        mixed = torch.sigmoid((q * k).mul_(self.scale)) * v * mask
        return hidden_states + self.out(mixed).tanh()


class Model(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        for layer in self.layers if checkpoints else ():
            forward = layer.forward
            layer.forward = lambda *args, forward=forward, **kwargs: checkpoint(
                forward, *args, use_reentrant=False, **kwargs
            )
        self.register_buffer("mask", torch.ones(ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x * 1.5
        for layer in self.layers:
            hidden = layer(hidden_states=hidden, mask=self.mask)
        return hidden.square().mean()


def offload(model: Model, fraction: float, axis: Communicator | None = None) -> ActivationOffload:
    layers = {f"layers.{index}": layer for index, layer in enumerate(model.layers)}
    staying = [*model.parameters(), *(layer.scale for layer in model.layers)]
    return ActivationOffload(
        model, layers, choose_offloaded(fraction, NUM_LAYERS), staying, axis or Communicator(Axis("pp", 1, 0)), CPU
    )


def microbatches(count: int) -> list[Tensor]:
    return [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def train(model: Model, order: str) -> list[Tensor]:
    """Gradients after forwards and backwards of microbatches in some order: `F0F1B0B1`; `R0`: a backward that keeps its graph."""
    inputs = [each.requires_grad_() for each in microbatches(3)]
    losses = {}
    for kind, number in zip(order[::2], map(int, order[1::2]), strict=True):
        if kind == "F":
            losses[number] = model(inputs[number])
        else:
            losses[number].backward(retain_graph=kind == "R")
    return [each.grad for each in (*model.parameters(), *inputs) if each.grad is not None]


ORDERS = ("F0B0F1B1F2B2", "F0F1F2B0B1B2", "F0F1B1F2B2B0", "F0F1R0R0B0B1")


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_gradients_are_bitwise_equal(fraction: float, order: str, checkpoints: bool) -> None:
    """Several microbatches between forward and backward, in any order, and graphs that are read more than once."""
    expected = train(Model(checkpoints), order)
    model = Model(checkpoints)
    offload(model, fraction)
    found = train(model, order)
    assert len(found) == len(expected) > NUM_LAYERS
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_memory_of_the_host_is_used_again_and_each_microbatch_has_its_own() -> None:
    model = Model()
    pool = offload(model, 1.0).pool
    train(model, ORDERS[0])
    of_one = pool.num_bytes
    train(model, ORDERS[0])
    assert pool.num_bytes == of_one > 0
    for _ in range(2):
        train(model, ORDERS[1])
        assert pool.num_bytes == 3 * of_one


def test_a_forward_without_gradients_offloads_nothing() -> None:
    model = Model()
    pool = offload(model, 1.0).pool
    with torch.no_grad():
        model(microbatches(1)[0])
    assert pool.num_bytes == 0


def test_blocks_that_are_too_small_make_room_for_larger_ones() -> None:
    pool = HostPool(CPU)
    for size in (64, 128, 192, 128):
        assert pool.take(size).memory.numel() >= size
    assert pool.num_bytes == 192
    with_both = pool.take(64), pool.take(64)
    assert [each.memory.numel() for each in with_both] == [192, 64]


class CountedCopies:
    """Bytes that a stream was asked to copy, by address of the source."""

    def __init__(self, offloaded: ActivationOffload):
        self.sizes: list[int] = []
        self._start = offloaded._to_host.start
        offloaded._to_host.start = self.start  # type: ignore[method-assign]

    def start(self, pairs):
        self.sizes += [source.numel() for _, source in pairs]
        return self._start(pairs)


def kept_storages(model: Model, x: Tensor) -> dict[int, int]:
    """Bytes of each storage that plain autograd keeps, without those of parameters and buffers, and of scalars."""
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        loss = model(x)
    of_model = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    found = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
    del loss
    return {address: size for address, size in found.items() if address not in of_model and size >= 1024}


def test_each_storage_travels_once_and_parameters_buffers_and_what_layers_share_never() -> None:
    x = microbatches(1)[0].requires_grad_()
    # Outside of layers `square` keeps the last one's output.
    expected = kept_storages(Model(), x)
    model = Model()
    copies = CountedCopies(offload(model, 1.0))
    model(x).backward()
    assert len(expected) > 4 * NUM_LAYERS
    assert sum(copies.sizes) == sum(expected.values()) - ROWS * WIDTH * 4
    assert len(copies.sizes) == len(expected) - 1


def test_a_checkpointed_layer_sends_its_input_alone() -> None:
    model = Model(checkpoints=True)
    copies = CountedCopies(offload(model, 1.0))
    model(microbatches(1)[0].requires_grad_()).backward()
    assert copies.sizes == [ROWS * WIDTH * 4] * NUM_LAYERS


def test_what_a_stage_has_received_stays() -> None:
    """The executor holds it for its gradient anyway: a copy on the host would save nothing."""
    model = Model(checkpoints=True)
    model.forward = lambda x: model.layers[0](x, mask=model.mask).square().mean()  # type: ignore[method-assign]
    copies = CountedCopies(offload(model, 1.0))
    model(microbatches(1)[0].requires_grad_()).backward()
    assert copies.sizes == []


class WritesToKept(Layer):
    """What torch refuses at backward: a tensor is changed that a product before has kept."""

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        kept = self.out(hidden_states)
        result = kept * kept
        kept.add_(1)
        return result


class WritesToInput(Layer):
    """As above, of the layer before: its last product has kept what this one writes to."""

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        return super().forward(hidden_states.add_(1), mask)


@pytest.mark.parametrize("kind", [WritesToKept, WritesToInput])
def test_a_model_that_writes_to_what_backward_needs_is_refused_as_torch_does(kind: type[Layer]) -> None:
    class EndsInItsOutput(Layer):
        def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
            return super().forward(hidden_states, mask).sigmoid()  # keeps its result

    def make() -> Model:
        model = Model()
        model.layers[0], model.layers[1] = EndsInItsOutput(), kind()
        return model

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(make(), ORDERS[0])
    model = make()
    offload(model, 1.0)
    with pytest.raises(ModelError, match="written to in place"):
        train(model, ORDERS[0])


# --- waits: on CPUs a copy is made when it is waited for, not before


def wrong(model: Model) -> bool:
    """Whether training notices: another gradient, or an error."""
    expected = train(Model(), ORDERS[1])
    try:
        found = train(model, ORDERS[1])
    except AssertionError:
        return True
    return not all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@contextmanager
def no_wait_for_the_store() -> Iterator[None]:
    def finish_store(this: LayerPass) -> None:
        this.sources, this.watched, this.copies = {}, [], None

    with patch.object(LayerPass, "finish_store", finish_store):
        yield


@contextmanager
def memory_given_up_before_the_wait() -> Iterator[None]:
    def finish_store(this: LayerPass) -> None:
        this.sources, this.watched, copies = {}, [], this.copies
        this.copies = None
        if copies is not None:
            copies.wait()

    with patch.object(LayerPass, "finish_store", finish_store):
        yield


@contextmanager
def no_wait_for_the_load() -> Iterator[None]:
    def read(this: OffloadedStorage) -> Tensor:
        assert this.loaded is not None
        return this.loaded

    with patch.object(OffloadedStorage, "read", read):
        yield


@contextmanager
def one_copy_of_all_microbatches() -> Iterator[None]:
    """A block that is given back as soon as it is filled."""

    def take(pool: HostPool, num_bytes: int) -> MagicMock:
        if not pool._idle:
            pool._idle.append(torch.empty(num_bytes * 2, dtype=torch.uint8))
        return MagicMock(memory=pool._idle[0])

    with patch.object(HostPool, "take", take):
        yield


@pytest.mark.parametrize(
    "sabotage",
    [no_wait_for_the_store, memory_given_up_before_the_wait, no_wait_for_the_load, one_copy_of_all_microbatches],
)
@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_a_wait_or_a_copy_less_is_noticed(sabotage: Callable, fraction: float) -> None:
    model = Model()
    offload(model, fraction)
    assert not wrong(model)
    with sabotage():
        model = Model()
        offload(model, fraction)
        assert wrong(model)


def test_a_copy_on_a_cpu_has_no_value_before_the_wait() -> None:
    target, source = torch.zeros(4), torch.ones(4)
    copies = CopyStream().start([(target, source)])
    assert target.isnan().all()
    copies.wait()
    copies.wait()
    assert torch.equal(target, source)
    with pytest.raises(AssertionError, match="the source of a copy was given up"):
        LateCopies([(target, torch.ones(4))]).wait()


def test_a_copy_on_a_gpu_runs_behind_the_computation_and_the_computation_behind_its_wait() -> None:
    """torch.cuda's calls in their order, on a machine without a GPU."""
    cuda, target, source = MagicMock(), MagicMock(device=torch.device("cuda:0")), MagicMock()
    cuda.attach_mock(target, "target")
    with patch.object(torch, "cuda", cuda):
        stream = CopyStream()
        copies = stream.start([(target, source)])
        copies.wait()
    own, current = cuda.Stream(), cuda.current_stream()
    order = [
        call.Stream().wait_stream(current),
        call.stream(own),
        call.target.copy_(source, non_blocking=True),
        call.current_stream().record_event(cuda.Event()),
        call.current_stream().wait_event(current.record_event()),
    ]
    made = [each for each in cuda.mock_calls if each in order]
    assert made[:5] == order


# --- a whole step


WIDTHS = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 4}
SEQUENCES, CONTEXT = 8, 64  # a number per token is more than LEAST_BYTES


def make_recipe(num_layers: int, checkpointing: str, fraction: float) -> tuple[Recipe, PretrainedConfig]:
    config = build_config(family("llama"), num_hidden_layers=num_layers, **WIDTHS)
    config.use_cache = False
    memory = Memory(compile="never", activation_checkpointing=checkpointing, offload=Offload(activations=fraction))  # type: ignore[arg-type]
    recipe = small_recipe("fp32", 1, sequences=SEQUENCES)
    return replace(recipe, memory=memory, batch=replace(recipe.batch, context=CONTEXT)), config


def make_run(num_layers: int, checkpointing: str, fraction: float) -> tuple[TrainingRun, list]:
    recipe, config = make_recipe(num_layers, checkpointing, fraction)
    mesh = connect(topology_of(recipe, config), CPU)
    (batch,) = make_batches(config, 1, SEQUENCES, CONTEXT, seed=11)
    run = build(make_plan(recipe, config), mesh)
    inputs = share(batch, SEQUENCES, mesh)
    train_step(run, inputs, 0, 1e-3)  # what only a first step allocates, blocks of the host among it
    return run, inputs


def measure_kept(run: TrainingRun, inputs: list) -> int:
    """Bytes that a step has allocated and not freed where its forward ends and its backward begins, as torch's allocator tells.
    Blocks of the host are there already. What goes in this step and was there before it, does not count: the allocator tells of
    it where a former profile has seen it come, and else not."""
    (stage,) = run.stages.values()
    recorded, backward, found = profile(activities=[ProfilerActivity.CPU], profile_memory=True), stage.backward, []

    def measured(*args):
        recorded.stop()
        found.append(sum(held_blocks(recorded).values()))
        backward(*args)

    stage.backward = measured  # type: ignore[method-assign]
    gc.disable()  # else what waits for the collector would be there or not
    try:
        recorded.start()
        train_step(run, inputs, 1, 1e-3)
    finally:
        gc.enable()
    return found[0]


def held_blocks(recorded: profile) -> dict[int, int]:
    """Bytes by address of what was allocated within a profile and not freed."""
    open_events, told = list(recorded.profiler.kineto_results.experimental_event_tree()), []
    while open_events:
        event = open_events.pop()
        open_events += event.children
        if event.name == "[memory]":
            told.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    held: dict[int, int] = {}
    for _, address, num_bytes in sorted(told, key=lambda each: each[0]):
        if num_bytes > 0:
            held[address] = num_bytes
        else:
            held.pop(address, None)
    return held


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_offloaded_layers_leave_not_one_byte_on_the_device(checkpointing: str) -> None:
    kept, on_host = {}, {}
    for layers, fraction in ((2, 1.0), (4, 1.0), (4, 0.5), (4, 0.0)):
        run, inputs = make_run(layers, checkpointing, fraction)
        kept[layers, fraction] = measure_kept(run, inputs)
        offload = run.stages[0].offload
        on_host[layers, fraction] = 0 if offload is None else offload.pool.num_bytes
    # With checkpointing a layer may have the state of the random numbers, which the host has anyway.
    states = (0, 2 * torch.get_rng_state().nbytes) if checkpointing == "full" else (0,)
    assert kept[4, 1.0] - kept[2, 1.0] in states
    # And what has left is on the host, once.
    for fraction in (0.5, 1.0):
        assert kept[4, 0.0] - kept[4, fraction] == on_host[4, fraction] > 0
        planned = make_plan(*make_recipe(4, checkpointing, fraction)).memory(0).on_host["activations"]
        assert on_host[4, fraction] == pytest.approx(planned, rel=0.01)


def test_the_plan_moves_what_is_offloaded_from_the_device_to_the_host() -> None:
    """Per microbatch in flight; but for two layers at once, or one where no neighbours are offloaded, and for what later stages
    have received."""
    recipe, config = make_recipe(8, "full", 0.0)
    memory = {}
    for fraction, count in product((0.0, 0.5, 1.0), (1, 2)):
        offloaded = replace(recipe.memory, offload=Offload(activations=fraction))
        piped = replace(
            recipe, memory=offloaded, parallel=Parallel(pp=count), launch=replace(recipe.launch, ranks=count),
            batch=replace(recipe.batch, sequences_per_microbatch=SEQUENCES // 2),
        )  # fmt: skip
        plan = make_plan(piped, config)
        memory[fraction, count] = [plan.memory(rank) for rank in range(count)]
    layer = make_plan(piped, config).activations.hidden_bytes
    for fraction, (num_layers, on_the_way) in {0.5: (4, 1), 1.0: (8, 2)}.items():
        (whole,), (before,) = memory[fraction, 1], memory[0.0, 1]
        assert whole.host == whole.on_host["activations"] == num_layers * layer
        assert before.allocated - whole.allocated == (num_layers - on_the_way) * layer
        # Of two stages the first has two microbatches in flight, and the second one, of which it keeps what it has received.
        first, second = (each.on_host["activations"] for each in memory[fraction, 2])
        assert [first, second] == [num_layers * layer, (num_layers // 2 - 1) * layer]
    assert not any(memory[0.0, 1][0].on_host.values())


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_what_recurrent_mixers_keep_is_moved_in_the_plan_too(fraction: float) -> None:
    """Delta rules in layers 0 and 2 of three, the second of which stays on the device with a fraction of a half."""
    config = build_config(next(each for each in RECURRENT if each.name == "qwen3_5_text"))
    recipe, _ = make_recipe(4, "none", 0.0)
    plans = [
        make_plan(replace(recipe, memory=replace(recipe.memory, offload=Offload(activations=each))), config)
        for each in (0.0, fraction)
    ]
    mixers, layer = plans[0].activations.mixers, plans[0].activations.layer_bytes
    assert [each != 0 for each in mixers] == [True, False, True]
    sizes = [layer + more if each else 0 for each, more in zip(choose_offloaded(fraction, 3), mixers, strict=True)]
    before, behind = (each.memory(0) for each in plans)
    assert behind.on_host["activations"] == sum(sizes)
    assert before.allocated - behind.allocated == sum(sizes) - max(sizes[0] + sizes[1], sizes[1] + sizes[2])


def test_copies_start_a_layer_ahead() -> None:
    """The order in which a step issues its copies: before the next layer's forward, and before the backward of the one behind."""
    run, inputs = make_run(4, "none", 1.0)
    (stage,) = run.stages.values()
    run.mesh.axis("pp").names_ranges = True
    for index in range(4):
        UnitRanges(f"layers.{index}", stage.model.model.get_submodule(f"model.layers.{index}"))
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        train_step(run, inputs, 1, 1e-3)
    words = ("forward of", "backward of", "to the host", "to the device")
    events = sorted((e for e in recorded.events() if e.name.startswith(words)), key=lambda e: e.time_range.start)
    begins = {event.name.replace("activations of ", ""): event.time_range.start for event in events}
    assert len(begins) == len(events) == 16
    for index in range(3):
        this, following = f"layers.{index}", f"layers.{index + 1}"
        assert begins[f"forward of {this}"] < begins[f"to the host: {this}"] < begins[f"forward of {following}"]
        assert begins[f"to the device: {this}"] < begins[f"backward of {following}"] < begins[f"backward of {this}"]
    assert begins["to the device: layers.3"] < begins["to the device: layers.2"]
