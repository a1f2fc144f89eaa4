"""RunState: with the tensors it is all that a resume needs, and it is JSON."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from framework.checkpoint.commit import FoundCheckpoints, open_checkpoint
from framework.checkpoint.folder import report
from framework.checkpoint.index import Manifest
from framework.checkpoint.load import form_of, load_checkpoint, load_newest
from framework.checkpoint.staging import Entry
from framework.comm.communicator import Communicator
from framework.comm.objects import all_gather_object, broadcast_object
from framework.data.growing import find_next_window
from framework.data.order import SampleOrder, index_samples
from framework.errors import StorageError
from framework.launch.identity import read_trained
from framework.launch.resume import ORDER_KEYS, Origin
from framework.lease import Lease
from framework.mesh.layout import Layout
from framework.model.initial import persistent_buffers
from framework.object_store import Place
from framework.optim.after_update import AVERAGE
from framework.parallel.zero.buffers import StoredTensor, UnitBuffer
from framework.recipe.keys import value_of
from framework.recipe.schema import Recipe
from framework.recipe.stages import tokens_per_step
from framework.train.step import TrainingRun
from framework.train.sums import SpikeState
from framework.train.update import find_parts

# A state that AdamW alone has.
SECOND_MOMENT = "exp_avg_sq"


@dataclass
class RunState:
    """The progress of a run.

    `samples` is the data cursor: order belongs to the data, so this one integer continues it on any number of ranks. There is no
    random state to keep: every seed is a function of (seed, step, microbatch).
    """

    run_id: str
    data: str  # fingerprint of the prepared data that `samples` counts
    step: int = 0
    samples: int = 0  # on which the weights have been trained, as `tokens`
    tokens: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0  # the last steps, over however many starts
    num_updates: int = 0
    squared_norms: float | None = None  # moving average of updates' gradients (optim/optimizers.py)
    loss_scale: float | None = None  # None: it never changes
    clean_steps: int = 0  # since it last did
    best_step: int | None = None  # with checkpoint.keep_best, where the validation loss was the lowest
    best_validation_loss: float | None = None  # or a score, negated where more is better
    data_step: int = 0  # steps that were trained on other data, of whose losses none counts as the best
    best_by: str = "True"  # the value of checkpoint.keep_best that chose it
    spikes: SpikeState = field(default_factory=SpikeState)
    rewinds: int = 0
    # Global samples [first, stop) that rewinds have left out; the cursor counts the others (`index_samples`).
    skipped_samples: list[list[int]] = field(default_factory=list)
    # Samples of each source that earlier stages have read: the cursor counts from there.
    read: dict[str, int] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)  # of the sources of this stage
    recipe: dict[str, Any] = field(default_factory=dict)  # with the tokenizer's hash: launch/identity.py
    tokenizer: str = ""
    base: str = ""  # fingerprint of the pretrained weights beside an adapter, which no checkpoint has

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "RunState":
        return cls(**{**values, "spikes": SpikeState(**values.get("spikes", {}))})


def restore(
    run: TrainingRun,
    checkpoints: Place,
    found: FoundCheckpoints | None = None,
    lease: Lease | None = None,
    load_held: Callable[[Sequence[Entry]], dict[str, Any] | None] = lambda entries: None,
    since: int = 0,
) -> RunState:
    """Fill a run from a step that nodes hold, or from the newest whole checkpoint, whatever layout saved it. found: checkpoints
    that rank 0 has found already. load_held: fills the entries and returns the state; None where a checkpoint must do.
    since: as of `load_newest`, which raises BeforeStage."""
    entries = list(read_entries(run))
    values = load_held(entries) or load_newest(
        checkpoints, entries, run.mesh.axis("world"), found, lease, updated_names(run), since
    )
    if values is None:
        raise StorageError(
            f"there is no checkpoint in {checkpoints}, and what nodes held cannot be loaded: the next start begins with step 1"
        )
    state = RunState.from_json(values)
    _take_loaded(run, state)
    return state


def _take_loaded(run: TrainingRun, state: RunState) -> None:
    """Have a run train on with the entries that were loaded. Collective over `replica`."""
    share_read(run)
    for stage in run.stages.values():
        stage.parameters.invalidate()  # what is unsharded is of former weights, where a run goes back
    run.optimizer.num_updates = state.num_updates
    if state.loss_scale is not None:
        run.loss_scale.restore(state.loss_scale, state.clean_steps)
    for buffer in run.buffers:
        buffer.copy_master_to_params()


def begin_branch(
    run: TrainingRun,
    run_id: str,
    manifest: Manifest,
    load: Callable[[Sequence[Entry]], dict[str, Any] | None],
    data: str,
    recipe: Recipe,
) -> tuple[RunState, list[str]]:
    """Fill a run from a checkpoint of another recipe, another run's or that of the stage before, and return where it begins, and
    the parameters of this rank whose moments begin at zero. Collective over the world.

    load: fills entries from the checkpoint with this manifest and returns its state. data: fingerprint of the prepared data;
    recipe: of this run or stage.

    The position in the data stays if data and `ORDER_KEYS` are the checkpoint's. If only the data differs, or of a stream
    only the context, a source that is the same goes on from its own position; else the data begins anew. Optimizer states are
    taken over where the checkpoint has all of a parameter's from the same update rule; the others begin at zero. AdamW counts
    its updates once for all parameters, so its states are taken over for all or for none. Raises as
    `load_checkpoint` does, for weights too.
    """
    world = run.mesh.axis("world")
    trained = read_trained(manifest.state)
    known = {name: (record.shape, record.dtype) for name, record in manifest.entries.items()}
    entries, states = list(read_entries(run)), dict[str, list[Entry]]()
    for entry in entries:
        kind, _, parameter = entry.name.partition("/")
        if kind not in ("weight", "buffer", AVERAGE):
            states.setdefault(parameter, []).append(entry)
    kept: dict[bool, set[str]] = {False: set(), True: set()}  # parameters, by whether AdamW updates them
    lacking = {False: set[str](), True: set[str]()}
    for parameter, own in states.items():
        # Only AdamW has both of its states; lion's is named as one of them, and sgd's sum as Muon's mean.
        is_adamw = SECOND_MOMENT in {each.name.partition("/")[0] for each in own}
        is_same_rule = is_adamw or trained.optim.name == run.optimizer.name
        is_there = all(known.get(each.name) == form_of(each) for each in own) and is_same_rule
        (kept if is_there else lacking)[is_adamw].add(parameter)
    begins_anew = any(all_gather_object(bool(lacking[True]), world))
    if begins_anew:
        lacking[True] |= kept[True]
    missing = {id(each) for group in lacking.values() for parameter in group for each in states[parameter]}
    wanted = [
        each
        for each in entries
        if id(each) not in missing and (each.name in known or not each.name.startswith(f"{AVERAGE}/"))
    ]
    read = [_in_saved_dtype(each, known) for each in wanted]
    values = load(read)
    assert values is not None, "there is a checkpoint"
    for entry, saved in zip(wanted, read, strict=True):
        if saved is not entry and isinstance(saved.data, Tensor):  # memory of its own
            if isinstance(entry.data, Tensor):
                entry.data.copy_(saved.data)
            else:
                entry.data.write(saved.data.to(entry.data.dtype))
    state = RunState.from_json(values)
    if begins_anew:
        state.num_updates, state.squared_norms = 0, None
    _take_loaded(run, state)
    if run.optimizer.averages is not None:
        # Averages that the checkpoint lacks: of parameters that were frozen, or of all.
        new = [part for part in find_parts(run.shards) if f"{AVERAGE}/{part.name}" not in known]
        run.optimizer.averages.restart(new)
    changed = {key for key in ORDER_KEYS if value_of(trained, key) != value_of(recipe, key)}
    is_same_data = state.data == data and not changed
    if not is_same_data:
        # A stream is read from its beginning to its end, in rows of whatever length.
        goes_on = not changed or (changed == {"batch.context"} and recipe.data.mode == "stream")
        state.read = count_read(state, trained, recipe) if goes_on else {}
        state.samples, state.skipped_samples, state.data_step = 0, [], state.step
        # Losses of other samples: none of them is the best so far, and none says what a spike is.
        state.best_step = state.best_validation_loss = None
    if not is_same_data or tokens_per_step(trained.batch) != tokens_per_step(recipe.batch):  # a norm is of a batch
        state.spikes = SpikeState(count=state.spikes.count)
    state.data = data
    if state.run_id != run_id:
        state.run_id, state.recipe, state.tokenizer = run_id, {}, ""
        state.best_step = state.best_validation_loss = None
        state.rewinds = 0
    return state, sorted(lacking[False] | lacking[True])


def report_new_moments(own: Sequence[str], of: str, world: Communicator) -> None:
    """Name the parameters whose moments begin at zero in training. own: of this rank, from `begin_branch`; of: the checkpoint.
    Collective."""
    names = sorted({name for each in all_gather_object(own, world) for name in each})
    if names and world.rank == 0:
        others = f" and {len(names) - 3} more" * (len(names) > 3)
        report(f"moments begin at zero, as {of} lacks them or some: {', '.join(names[:3])}{others}")


def count_read(state: RunState, trained: Recipe, recipe: Recipe) -> dict[str, int]:
    """Samples of `recipe` behind which it goes on in each source that a run has as well: those that were read, or of another
    length (of a stream) all up to the next window. trained: with which the run has read the last of them."""
    data, was, now = trained.data, trained.batch.context, recipe.batch.context
    weights = state.weights or {name: source.weight for name, source in data.read.items()}
    order = SampleOrder.of(recipe.train.seed, {name: (weight, 1) for name, weight in weights.items()})
    [num_samples] = index_samples(np.array([state.samples]), state.skipped_samples)
    read = dict(zip(weights, map(int, order.count(int(num_samples))), strict=True))
    sources, total = recipe.data.sources, {name: state.read.get(name, 0) + read.get(name, 0) for name in data.sources}
    return {
        name: total[name] if was == now else find_next_window(total[name], was, now)
        for name, source in data.sources.items()
        if name in sources and replace(sources[name], weight=source.weight, epochs=source.epochs) == source
    }


def begin_from(run: TrainingRun, run_id: str, origin: Origin, data: str, recipe: Recipe) -> tuple[RunState, list[str]]:
    """`begin_branch` from a checkpoint of another run."""
    world, checkpoint = run.mesh.axis("world"), origin.checkpoint
    assert checkpoint is not None, "a run begins with step 0 by itself"
    manifest = broadcast_object(lambda: open_checkpoint(checkpoint), world)
    load = partial(load_checkpoint, checkpoint, world=world, manifest=manifest)
    return begin_branch(run, run_id, manifest, load, data, recipe)


def _in_saved_dtype(entry: Entry, known: Mapping[str, tuple[tuple[int, ...], str]]) -> Entry:
    """The entry, with memory of its own where the checkpoint has another dtype: a parameter that is frozen has that of forwards,
    one that is trained that of masters."""
    saved = known.get(entry.name)
    if saved is None or saved == form_of(entry):
        return entry
    device = entry.data.device if isinstance(entry.data, Tensor) else None
    return replace(entry, data=torch.empty(entry.data.shape, dtype=getattr(torch, saved[1]), device=device))


def saved_entries(run: TrainingRun) -> Iterator[Entry]:
    """All tensors of a run as checkpoint entries over the run's own memory: each element once over all ranks, but for small
    tensors that all ranks have.

    weight/NAME: the master copy of a parameter, or the frozen parameter, unless it is beside an adapter. buffer/NAME: a buffer
    of the model's state dict. Others: the optimizer's state of that name.
    """
    yield from _entries(run, UnitBuffer.counted, [buffer for buffer in run.saved_buffers if not buffer.is_copy])
    by_name = dict(each for stage in run.stages.values() for each in persistent_buffers(stage.model.model).items())
    # Copied, because a forward may change them, and the next one may run before they are saved. All else changes in updates.
    yield from (_buffer_entry(name, tensor.clone()) for name, tensor in by_name.items())


def read_entries(run: TrainingRun) -> Iterator[Entry]:
    """The entries that this rank reads of a checkpoint. Replicas read a share each of what they own alike, and `share_read`
    completes every rank. Were each to read all that it owns, r replicas would open the files of all r: r^2 for stage 0."""
    run.optimizer.open_states()
    yield from _entries(run, UnitBuffer.read, run.saved_buffers)
    for stage in run.stages.values():
        for name, tensor in persistent_buffers(stage.model.model).items():
            yield _buffer_entry(name, tensor)


def updated_names(run: TrainingRun) -> set[str]:
    """The names of entries that updates change: their values must be finite, or every step from there on would be skipped. Frozen
    parameters and buffers may hold any values."""
    trained = [slot.name for buffer in run.buffers if buffer.is_trained for slot in buffer.slots]
    return {f"{kind}/{name}" for kind in ("weight", *run.optimizer.state_names) for name in trained}


def share_read(run: TrainingRun) -> None:
    """Complete the entries of `read_entries`: replicas exchange their shares. Collective over `replica`."""
    for buffer in run.saved_buffers:
        _share_read(buffer, buffer.master_at_home)
    for name in run.optimizer.state_names:
        for each in (each for each in run.shards if run.optimizer.has_state(each.shard, name)):
            _share_read(each.buffer, run.optimizer.state(each.shard, name), each.span.start)
    run.optimizer.close_states()


def _share_read(buffer: UnitBuffer, values: Tensor | StoredTensor, origin: int | None = None) -> None:
    if isinstance(values, Tensor):
        buffer.share_read(values, origin)
    elif buffer.plan.axes.reading.size > 1:  # alone, this rank has read everything
        in_memory = values.read()
        buffer.share_read(in_memory, origin)
        values.write(in_memory)


def _entries(
    run: TrainingRun, cut: Callable[..., tuple[Layout, Any]], buffers: Sequence[UnitBuffer]
) -> Iterator[Entry]:
    """Entries of parameters and optimizer states. cut: of a buffer, a slot and values, the layout and elements of an entry;
    buffers: those of the run that have entries."""
    for buffer in buffers:
        for slot in buffer.slots:
            yield Entry(f"weight/{slot.name}", *cut(buffer, slot, buffer.master_at_home))
    own = [each for each in run.shards if each.buffer in buffers]
    for name in run.optimizer.state_names:
        for each in (each for each in own if run.optimizer.has_state(each.shard, name)):
            values = run.optimizer.state(each.shard, name)
            for slot in (slot for slot in each.buffer.slots if slot.group == each.span.group):
                yield Entry(f"{name}/{slot.name}", *cut(each.buffer, slot, values, each.span.start))


def _buffer_entry(name: str, tensor: Tensor) -> Entry:
    return Entry(f"buffer/{name}", Layout(tuple(tensor.shape), replicated=("world",)), tensor.view(-1))
