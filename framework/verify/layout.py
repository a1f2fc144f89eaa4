"""The layout under test: ranks of this machine that build and step it by the code that trains, on given batches."""

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Literal

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.utils.logging import set_verbosity_error

from framework.comm.codec import BlockCodec
from framework.comm.collectives import all_gather
from framework.comm.communicator import Communicator
from framework.comm.connect import Mesh, connect
from framework.comm.objects import all_gather_object
from framework.data.loader import split_rows
from framework.data.pack import Microbatch, cut_context
from framework.mesh.layout import Layout
from framework.mesh.token_layout import ContextSlices
from framework.model.initial import draw_unit
from framework.model.load import build_meta
from framework.model.objective import Pairs
from framework.model.peft import add_adapters
from framework.model.units import find_units
from framework.optim.groups import learning_rate
from framework.optim.states import LowBitStates
from framework.parallel.zero.buffer_plan import BufferDtypes
from framework.parallel.zero.buffers import UnitBuffer
from framework.plan.plan import Plan, make_plan
from framework.recipe.derive import derive
from framework.recipe.plugins import import_plugins
from framework.recipe.schema import Adapter, Recipe
from framework.train.build import build
from framework.train.step import TrainingRun, refuse_overflow, train_step
from framework.train.update import OwnedShard
from framework.verify.evidence import Evidence, TokenBatch, keep_double, make_batches
from framework.verify.plain_rounding import round_base

CPU = torch.device("cpu")
NO_ADAPTER = Adapter()

# Layout of every parameter by name, with its own elements in the order of the interval.
Owned = dict[str, tuple[Layout, Tensor]]


def run_layout(plan: Plan, batches: Sequence[TokenBatch], mesh: Mesh) -> Evidence:
    """Train the plan's layout on the batches; the evidence is gathered on every rank."""
    # Closed also where a step fails: states on a disk leave no file behind.
    with closing(build(plan, mesh)) as run:
        return _train(run, plan, batches, mesh)


def _train(run: TrainingRun, plan: Plan, batches: Sequence[TokenBatch], mesh: Mesh) -> Evidence:
    recipe, losses, norms, gradients, by_step = plan.recipe, [], [], {}, []
    for step, batch in enumerate(batches):
        lr = learning_rate(step, recipe.optim.schedule, recipe.optim.lr, recipe.train.steps)
        microbatches = share(batch, recipe.batch.sequences_per_microbatch, mesh)
        with keep_double(plan.compute_dtype):
            values = train_step(run, microbatches, step, lr).read()
        if not values.is_finite:
            refuse_overflow(run, recipe.parallel.expert_padding, step + 1)
        losses.append(values.loss)
        norms.append(values.gradient_norm)
        if step == 0:
            gradients = gather_full(owned_gradients(run), mesh.axis("world"))
        if is_followed(recipe) or step == len(batches) - 1:
            by_step.append(gather_full(owned_weights(run), mesh.axis("world")))
    followed = tuple(by_step) if is_followed(recipe) else ()
    blocks = gather_full(owned_blocks(run), mesh.axis("world")) if recipe.precision.moments == "int8" else {}
    gathered = gather_codes(run, mesh, lambda dtypes: dtypes.codec) if recipe.zero.quantize_gather != "none" else {}
    reduced = gather_codes(run, mesh, lambda dtypes: dtypes.reduced) if recipe.zero.quantize_reduce != "none" else {}
    averages = gather_full(owned_averages(run), mesh.axis("world")) if recipe.train.ema is not None else {}
    return Evidence(
        tuple(losses),
        tuple(norms),
        gradients,
        by_step[-1],
        followed,
        blocks=blocks,
        gathered=gathered,
        reduced=reduced,
        averages=averages,
    )


def is_followed(recipe: Recipe) -> bool:
    """Whether the oracle follows the layout: it then needs the layout's weights after each step, or its blocks."""
    return recipe.optim.name == "lion" or recipe.precision.moments == "int8" or is_quantized(recipe)


def is_quantized(recipe: Recipe) -> bool:
    """Whether parameters or gradients travel as codes."""
    return recipe.zero.quantize_gather != "none" or recipe.zero.quantize_reduce != "none"


def share(batch: TokenBatch, sequences_per_microbatch: int, mesh: Mesh) -> list[Microbatch]:
    """This rank's microbatches, in the loader's order: microbatch m of rank r has sequences from (m * dp + r) * b, and this rank
    of `cp` has its tokens of each."""
    dp, ulysses, ring = (mesh.axis(name) for name in ("dp", "ulysses", "ring"))
    slices = ContextSlices(batch.input_ids.shape[1], ulysses.size, ring.size, mesh.axis("cp").rank)
    rows = Microbatch(batch.input_ids, batch.labels, batch.position_ids, pairs=_find_pairs(batch))
    whole = split_rows(rows, sequences_per_microbatch)
    return [cut_context(each, slices) for each in whole[dp.rank :: dp.size]]


def _find_pairs(batch: TokenBatch) -> Pairs | None:
    if batch.answers is None or batch.position_ids is None:
        return None
    places = (batch.position_ids == 0).cumsum(1) - 1
    return Pairs(places, batch.answers.kinds, torch.zeros_like(batch.answers.kinds), batch.answers.reference)


def _own_buffers(run: TrainingRun) -> list[UnitBuffer]:
    return [buffer for buffer in run.buffers if not buffer.is_copy]


def _of_buffers(buffers: Sequence[UnitBuffer], value_of: Callable[[UnitBuffer], Tensor]) -> Owned:
    """Layout and own elements of every parameter, of a value for each element that its buffer owns."""
    return {slot.name: buffer.counted(slot, value_of(buffer)) for buffer in buffers for slot in buffer.slots}


def _of_shards(run: TrainingRun, value_of: Callable[[OwnedShard], Tensor]) -> Owned:
    """The same of every trained parameter, of a value for each element of its shard."""
    return {
        slot.name: each.buffer.counted(slot, value_of(each), each.span.start)
        for each in run.shards
        if not each.buffer.is_copy
        for slot in each.buffer.slots
        if slot.group == each.span.group
    }


def _zeros(buffer: UnitBuffer) -> Tensor:
    return torch.zeros(buffer.plan.numel_owned, device=buffer.full.device)


def owned_gradients(run: TrainingRun) -> Owned:
    """Layout and own elements of every gradient: zero where a parameter is frozen, as the oracle has it."""
    return _of_buffers(_own_buffers(run), lambda each: each.delivered if each.is_trained else _zeros(each))


def owned_weights(run: TrainingRun) -> Owned:
    """Layout and own elements of every parameter, in the master dtype, and of every correction bias that is a buffer."""
    parameters: Owned = {}
    for buffer in _own_buffers(run):
        with buffer.master_in_memory() as master:
            parameters |= {slot.name: buffer.counted(slot, master) for slot in buffer.slots}
    buffers = dict(each for stage in run.stages.values() for each in stage.model.model.named_buffers())
    biases = {each.bias: buffers[each.bias] for each in run.load.mixtures if each.bias in buffers}
    return parameters | {name: (Layout(tuple(bias.shape)), bias.view(-1)) for name, bias in biases.items()}


def owned_blocks(run: TrainingRun) -> Owned:
    """Layout of every parameter and, for each own element, the number of the first element of its block of moments.

    0 for frozen parameters, so that a rank that trains nothing has something to gather, too.
    """

    def find_starts(owned: OwnedShard) -> Tensor:
        states = run.optimizer.states_of(owned.shard)
        assert isinstance(states, LowBitStates)
        return states.block_starts(owned.shard).double()

    frozen = [each for each in _own_buffers(run) if not each.is_trained]
    return _of_buffers(frozen, _zeros) | _of_shards(run, find_starts)


def owned_averages(run: TrainingRun) -> Owned:
    """`owned_weights` with the averages of trained parameters in their place."""
    averages = run.optimizer.averages
    assert averages is not None, "no averages (train.ema)"
    return owned_weights(run) | _of_shards(run, lambda each: averages.of(each.shard))


def gather_codes(run: TrainingRun, mesh: Mesh, codec_of: Callable[[BufferDtypes], object]) -> dict[str, Tensor]:
    """For each element of every parameter, a number of its block of codes that no other block has; -1 without.

    codec_of: the codec that is asked for, of a buffer's dtypes. Collective.
    """
    found: Owned = {}
    for index, buffer in ((index, buffer) for index, buffer in enumerate(run.buffers) if not buffer.is_copy):
        plan, axes, codec = buffer.plan, buffer.plan.axes, codec_of(buffer.plan.dtypes)
        numbers = torch.full((plan.numel_owned,), -1.0, dtype=torch.float64, device=buffer.full.device)
        if isinstance(codec, BlockCodec):
            # The first of all ranks that have the buffer: where these count parts of one block, they number it alike.
            first = mesh.rank - sum(
                each.ranks[each.rank] - each.ranks[0] for each in (axes.shard, axes.update, *axes.replicas)
            )
            blocks = torch.arange(plan.numel_owned, device=buffer.full.device).double() // codec.block
            owner = axes.shard.rank * axes.update.size + axes.update.rank
            numbers = blocks + float((first * len(run.buffers) + index) * 2**12 + owner) * 2**24
        found |= {slot.name: buffer.counted(slot, numbers) for slot in buffer.slots}
    return gather_full(found, mesh.axis("world"))


def initial_weights(
    config: PretrainedConfig, seed: int, device: torch.device = CPU, adapter: Adapter = NO_ADAPTER
) -> dict[str, Tensor]:
    """Initial parameters of the whole model, and of its adapters, as ranks on `device` draw and round them, by name: fp32 on the
    CPU."""
    model = build_meta(config)
    add_adapters(model, adapter)
    values = {
        name: value.cpu() for unit in find_units(model) for name, value in draw_unit(model, unit, seed, device).items()
    }
    return round_base(model, adapter, values)


def gather_full(parts: Owned, world: Communicator) -> dict[str, Tensor]:
    """Full tensors by name, on the CPU of every rank, from the elements that each rank owns.

    parts: by name, the layout and its own elements, flat and in the order of the interval. Gathers over `world`, in fp64, which
    holds the numbers of any other dtype. Only box arithmetic, so that no code of the layouts under test puts them together.
    """
    own = torch.cat([flat.detach().double() for _, flat in parts.values()])
    owned = [(name, layout.shape, flat.dtype, layout.boxes()) for name, (layout, flat) in parts.items()]
    of_ranks = all_gather_object((owned, len(own)), world)
    values = own.new_zeros(world.size, max(length for _, length in of_ranks))
    values[world.rank, : len(own)] = own
    all_gather(values, values[world.rank], world)
    full: dict[str, Tensor] = {}
    for (places, _), flat in zip(of_ranks, values.cpu(), strict=True):
        start = 0
        for name, shape, dtype, boxes in places:
            for box in boxes:
                if name not in full:
                    full[name] = torch.full(shape, torch.nan, dtype=dtype)
                full[name][box.slices()] = flat[start : start + box.numel].view(box.sizes)
                start += box.numel
    return full


TIMEOUT_S = 120.0


def make_run_batches(recipe: Recipe, config: PretrainedConfig, num_steps: int) -> list[TokenBatch]:
    """The batches of a verification, equal in every process."""
    derived = derive(recipe)
    packs_documents = recipe.data.isolates
    return make_batches(
        config, num_steps, derived.sequences_per_step, derived.context, recipe.train.seed, packs_documents, recipe.loss
    )


def run_rank(
    rank: int, world: int, rendezvous: str, recipe: Recipe, config: PretrainedConfig, num_steps: int
) -> Evidence | None:
    """Body of a pool's rank: run the recipe's layout. Rank 0 returns the evidence."""
    torch.set_num_threads(1)
    set_verbosity_error()
    import_plugins(recipe.plugins)
    plan = make_plan(recipe, config)
    device, backend = choose_rank_device(recipe.launch.device, rank, world)
    compute_exactly(device)
    mesh = connect(plan.topology, device, rendezvous, rank, TIMEOUT_S, backend=backend)
    evidence = run_layout(plan, make_run_batches(recipe, config, num_steps), mesh)
    mesh.close()
    return evidence if rank == 0 else None


def choose_rank_device(kind: str, rank: int, world: int) -> tuple[torch.device, Literal["gloo", "nccl"]]:
    """A rank's device and the backend that all ranks use: NCCL if each has a GPU for itself, else gloo, and GPUs are shared."""
    if kind == "cpu":
        return torch.device("cpu"), "gloo"
    num_gpus = torch.cuda.device_count()
    return torch.device("cuda", rank % num_gpus), "nccl" if num_gpus >= world else "gloo"


def compute_exactly(device: torch.device) -> None:
    """Make this process compute in fp32 where it says fp32 (no TF32), accumulate bf16 and fp16 matmuls in fp32, and use
    deterministic kernels where there are any."""
    torch.set_float32_matmul_precision("highest")
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.use_deterministic_algorithms(True, warn_only=True)
