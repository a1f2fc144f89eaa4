"""The layout under test, built and stepped by the same code that trains, on given batches."""

from collections.abc import Sequence
from contextlib import closing

import torch
from torch import Tensor
from transformers import PretrainedConfig

from framework.comm.collectives import all_gather, gather_objects
from framework.comm.communicator import Communicator
from framework.comm.connect import Mesh
from framework.data.loader import split_rows
from framework.data.pack import Microbatch
from framework.data.slices import cut_context
from framework.mesh.context import ContextSlices
from framework.mesh.layout import Layout
from framework.model.load import build_meta
from framework.model.materialize import initialize_unit
from framework.model.units import find_units
from framework.optim.schedules import learning_rate
from framework.optim.states import LowBitStates
from framework.plan.plan import Plan
from framework.recipe.schema import Recipe
from framework.train.build import build
from framework.train.step import TrainingRun, train_step
from framework.train.update import OwnedShard
from framework.verify.double import keep_double
from framework.verify.evidence import Evidence, TokenBatch


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
        losses.append(values.loss)
        norms.append(values.gradient_norm)
        if step == 0:
            gradients = gather_full(owned_gradients(run), mesh.axis("world"))
        if is_followed(recipe) or step == len(batches) - 1:
            by_step.append(gather_full(owned_weights(run), mesh.axis("world")))
    followed = tuple(by_step) if is_followed(recipe) else ()
    blocks = gather_full(owned_blocks(run), mesh.axis("world")) if recipe.precision.moments == "int8" else {}
    return Evidence(tuple(losses), tuple(norms), gradients, by_step[-1], followed, blocks=blocks)


def is_followed(recipe: Recipe) -> bool:
    """Whether the oracle needs to know this layout's weights after each step, or its blocks of moments, before it can begin."""
    return recipe.optim.name == "lion" or recipe.precision.moments == "int8"


def share(batch: TokenBatch, sequences_per_microbatch: int, mesh: Mesh) -> list[Microbatch]:
    """This rank's microbatches, in the loader's order: microbatch m of rank r holds sequences from (m * dp + r) * b, and of each
    the tokens that this rank of `cp` has."""
    dp, ulysses, ring = (mesh.axis(name) for name in ("dp", "ulysses", "ring"))
    slices = ContextSlices(batch.input_ids.shape[1], ulysses.size, ring.size, mesh.axis("cp").rank)
    whole = split_rows(Microbatch(batch.input_ids, batch.labels, batch.position_ids), sequences_per_microbatch)
    return [cut_context(each, slices) for each in whole[dp.rank :: dp.size]]


def owned_gradients(run: TrainingRun) -> dict[str, tuple[Layout, Tensor]]:
    """Layout and own elements of every gradient: zero where a parameter is frozen, as the oracle has it."""
    return {
        slot.name: buffer.counted(slot, buffer.delivered if buffer.is_trained else torch.zeros_like(buffer.master))
        for buffer in run.buffers
        if not buffer.is_copy
        for slot in buffer.slots
    }


def owned_weights(run: TrainingRun) -> dict[str, tuple[Layout, Tensor]]:
    """Layout and own elements of every parameter, in the master dtype, and of every correction bias that is a buffer."""
    parameters: dict[str, tuple[Layout, Tensor]] = {}
    for buffer in (buffer for buffer in run.buffers if not buffer.is_copy):
        with buffer.master_in_memory() as master:
            parameters |= {slot.name: buffer.counted(slot, master) for slot in buffer.slots}
    buffers = dict(each for stage in run.stages.values() for each in stage.model.model.named_buffers())
    biases = {each.bias: buffers[each.bias] for each in run.load.mixtures if each.bias in buffers}
    return parameters | {name: (Layout(tuple(bias.shape)), bias.view(-1)) for name, bias in biases.items()}


def _find_block_starts(run: TrainingRun, owned: OwnedShard) -> Tensor:
    states = run.optimizer.states_of(owned.shard)
    assert isinstance(states, LowBitStates)
    return states.block_starts(owned.shard).double()


def owned_blocks(run: TrainingRun) -> dict[str, tuple[Layout, Tensor]]:
    """Layout and, of own elements of every parameter, the number of the first element of the block of its moments: 0 where it is
    frozen, so that a rank that trains nothing has something to gather, too."""
    frozen = {
        slot.name: buffer.counted(slot, torch.zeros_like(buffer.master))
        for buffer in run.buffers
        if not buffer.is_copy and not buffer.is_trained
        for slot in buffer.slots
    }
    return frozen | {
        slot.name: each.buffer.counted(slot, _find_block_starts(run, each), each.span.start)
        for each in run.shards
        if not each.buffer.is_copy
        for slot in each.buffer.slots
        if slot.group == each.span.group
    }


def initial_weights(config: PretrainedConfig, seed: int) -> dict[str, Tensor]:
    """The seeded initial parameters of the whole model, fp32 on the CPU, by name."""
    model = build_meta(config)
    values: dict[str, Tensor] = {}
    for unit in find_units(model):
        programs = initialize_unit(model, unit, seed, unit.parameters)
        values |= {name: program.whole() for name, program in programs.items()}
    return values


def gather_full(parts: dict[str, tuple[Layout, Tensor]], world: Communicator) -> dict[str, Tensor]:
    """Full tensors by name, on the CPU of every rank, from the elements that each rank owns.

    parts: by name, the layout and its own elements, flat and in the order of the interval. Gathers over `world`, in fp64, which
    holds the numbers of any other dtype. Only box arithmetic, so that no code of the layouts under test puts them together.
    """
    own = torch.cat([flat.detach().double() for _, flat in parts.values()])
    owned = [(name, layout.shape, flat.dtype, layout.boxes()) for name, (layout, flat) in parts.items()]
    of_ranks = gather_objects((owned, len(own)), world)
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
