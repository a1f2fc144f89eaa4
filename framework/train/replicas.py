"""Comparison of replicas: ranks that hold the same elements must hold the same bits, in every step.

No rank sends updated replicas: each computes its own from gradients that a sum has made equal, bit by bit. A flipped bit, a
missing sum or a kernel that is not deterministic lets them drift apart, and the loss does not show it soon.

    state        compared over                                     when
    parameters   axes that gather the same: shard, update, replicas  in the step, as forward and backward have read them
    master       the buffer's replicas                             behind the update
    moments      the same                                          behind the update
    buffers      the ranks of a stage                              behind the update

A rank hashes its bits (`BitHash`), one number for each unit's buffer and state, and ranks compare the largest with the
smallest: an all-reduce of 16 bytes a number over each axis of replicas, and one number over the world. Only where they differ do
all ranks exchange their hashes, and the majority tells which rank is wrong.

Values that one rank alone holds cannot be compared: masters and moments that ZeRO shards over all ranks, and a unit's parameters
at stage 3, which exist for one use at a time.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from socket import gethostname

import torch
from torch import Tensor

from framework.comm.collectives import all_reduce
from framework.comm.objects import all_gather_object
from framework.comm.transfer import upload
from framework.errors import DriftError
from framework.model.initial import persistent_buffers
from framework.monitor.progress import name_coordinates
from framework.parallel.zero.buffers import UnitBuffer
from framework.parallel.zero.replicas import Hashed, find_differing, find_drift, hash_buffer
from framework.parallel.zero.row_codes import RowCodec
from framework.train.step import TrainingRun

BUFFER_AXES = ("batch", "tp")


@dataclass(frozen=True)
class Difference:
    """A value that differs between `ranks`, with the hash that this rank has."""

    state: str
    unit: str
    key: str
    ranks: tuple[int, ...]
    hash: int


def hash_states(run: TrainingRun) -> list[Hashed]:
    """Hashes of masters, moments and the model's buffers, between steps."""
    hashed = []
    for buffer in run.buffers:
        # Values without a replica are not read.
        if any(axis.size > 1 for axis in buffer.plan.axes.replicas) or any(buffer in pair for pair in run.tied_copies):
            for state, pieces in (("master", _master(buffer)), ("moments", _moments(run, buffer))):
                hashed.append(hash_buffer(buffer, state, buffer.plan.axes.replicas, run.hashes.hash(pieces)))
    axes = tuple(run.mesh.axis(name) for name in BUFFER_AXES)
    for stage in run.stages.values():
        for name, tensor in persistent_buffers(stage.model.model).items():
            value = run.hashes.hash([tensor.reshape(-1)])
            hashed.append(Hashed("buffer", name, name, axes, value))
    return hashed


def find_differences(run: TrainingRun, hashed: Sequence[Hashed]) -> list[Difference]:
    """The hashes of this rank that differ from those of some rank of an axis. Collective over all axes: an all-reduce of 16 bytes
    a hash over each."""
    return [
        *_compare_tied(run, hashed),
        *(Difference(x.state, x.unit, x.key, axis.ranks, int(x.hash)) for x, axis in find_differing(hashed)),
    ]


def check_replicas(run: TrainingRun, step: int, parameters: Sequence[Hashed] = ()) -> None:
    """Raise DriftError on all ranks if some of them hold different values of what they hold alike. Collective over the world:
    one number, so that ranks that saw nothing stop with the others instead of waiting for them in the next step.

    step: that was taken last. parameters: of `hash_parameters` in it.
    """
    world = run.mesh.axis("world")
    found = find_differences(run, [*parameters, *hash_states(run)])
    count = upload(torch.tensor(len(found)), run.mesh.device)
    all_reduce(count, world, label="do replicas differ?")
    if not count:
        return
    place = f"rank {run.mesh.rank} [{name_coordinates(run.mesh.topology, run.mesh.rank)}] on {gethostname()}"
    mine = Witness(place, tuple(found), tuple(find_drift(run.buffers, run.hashes)))
    witnesses = all_gather_object(mine, world)
    named = list(dict.fromkeys(name for each in witnesses for name in each.parameters))
    shown = f" ({', '.join(named[:3])}{f' and {len(named) - 3} more' if len(named) > 3 else ''})" if named else ""
    raise DriftError(
        f"after step {step:,} ranks hold different values of what they should hold alike{shown}:"
        + "".join(f"\n  {line}" for line in describe(witnesses))
        + "\nA device or its memory is faulty, or ranks computed the same with different kernels. Nothing of it was saved since"
        " replicas were compared last: the run goes on from the newest checkpoint. If it comes again on one node, leave that"
        " node out; if on others, `meshwright verify` tells whether the layout is at fault"
    )


@dataclass(frozen=True)
class Witness:
    """The statement of one rank: its name, its differences, and the parameters that differ."""

    place: str
    differences: tuple[Difference, ...]
    parameters: tuple[str, ...] = ()


def describe(witnesses: Sequence[Witness]) -> list[str]:
    """A line for each state of a unit that differs. witnesses: of all ranks, in their order.

    Ranks are joined over the axes on which they differ. The hash of the majority is taken for the right one; without a majority
    all ranks are named.
    """
    lines = []
    names = {(each.key, each.state): each.unit for witness in witnesses for each in witness.differences}
    for (key, state), unit in names.items():
        told = {
            rank: each
            for rank, witness in enumerate(witnesses)
            for each in witness.differences
            if (each.key, each.state) == (key, state)
        }
        for group in _join(told):
            lines.append(f"{state} of {unit}: {_accuse({rank: told[rank].hash for rank in group}, witnesses)}")
    return lines


def _accuse(hashes: Mapping[int, int], witnesses: Sequence[Witness]) -> str:
    if len(hashes) == 1:  # two stages of it
        return f"{witnesses[next(iter(hashes))].place} has it twice, and the two differ"
    usual, votes = Counter(hashes.values()).most_common(1)[0]
    named = [rank for rank, value in hashes.items() if value != usual]
    if 2 * votes <= len(hashes):
        all_of_them = " and ".join(witnesses[rank].place for rank in hashes)
        return f"{all_of_them} differ, and no majority tells which is wrong"
    wrong = " and ".join(witnesses[rank].place for rank in named)
    return f"{wrong} differ{'s' * (len(named) == 1)} from {votes} others, which are equal"


def _join(told: Mapping[int, Difference]) -> list[list[int]]:
    """Groups of the ranks that differ, joined over their axes."""
    groups: list[set[int]] = []
    for rank, each in told.items():
        joined = {rank, *(other for other in each.ranks if other in told)}
        apart = [group for group in groups if not group & joined]
        groups = [*apart, joined.union(*(group for group in groups if group & joined))]
    return [sorted(group) for group in groups]


def _master(buffer: UnitBuffer) -> Iterator[Tensor]:
    if buffer.stored is not None:
        yield from buffer.stored.pieces()
    elif isinstance(buffer.plan.dtypes.codec, RowCodec):
        yield buffer.master  # codes and scales: bytes, and no padding
    else:
        # Without padding, which no update touches.
        yield buffer.master[: max(0, buffer.plan.numel - buffer.plan.start)]


def _moments(run: TrainingRun, buffer: UnitBuffer) -> Iterator[Tensor]:
    for shard in (each.shard for each in run.shards if each.buffer is buffer):
        if buffer.stored is None:
            yield from run.optimizer.states_of(shard).memory(shard, 0, shard.value.numel())
        else:
            for name in (name for name in run.optimizer.state_names if run.optimizer.has_state(shard, name)):
                state = run.optimizer.state(shard, name)
                yield from (state,) if isinstance(state, Tensor) else state.pieces()


def _compare_tied(run: TrainingRun, hashed: Sequence[Hashed]) -> Iterator[Difference]:
    """Parameters that two stages of this rank have."""
    tied = {buffer.slots[0].name for pair in run.tied_copies for buffer in pair}
    for state in ("master", "moments"):
        for name in tied:
            values = [int(each.hash) for each in hashed if (each.state, each.key) == (state, name)]
            if len(set(values)) > 1:
                unit = f"{name}, in two stages"
                yield Difference(state, unit, f"{name} here", (run.mesh.rank,), values[0])
