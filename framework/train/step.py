"""One training step: forward and backward of all microbatches by the schedule, gradient norm, update. Axes of size 1 take the
same path."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from math import ceil

import torch
from torch import Tensor

from framework.comm.algorithms import ExposedCommunication
from framework.comm.collectives import all_reduce, start_all_reduce
from framework.comm.connect import Mesh
from framework.comm.transfer import AsyncHostCopy, upload
from framework.data.pack import Microbatch
from framework.errors import RecipeError
from framework.model.mixtures import ExpertLoad
from framework.model.objective import LOSSES, Objective
from framework.optim.disk_ring import DiskStates
from framework.optim.optimizers import Missed, clip_divisor, norm_rows, squared_norm
from framework.parallel.experts.dispatch import find_needed_padding
from framework.parallel.pipeline.execute import ActivationSpec, StageLinks, execute
from framework.parallel.pipeline.pipeline import FORWARDS_AT_ONCE, PipelinePlan
from framework.parallel.pipeline.simulate import Timed
from framework.parallel.zero.buffer_plan import Slot
from framework.parallel.zero.buffers import MainGradView, UnitBuffer
from framework.parallel.zero.gradients import sum_over_stages
from framework.parallel.zero.replicas import BitHash, Hashed, hash_parameters
from framework.plan.plan import Plan
from framework.recipe.method_schema import PROBE, LossSettings
from framework.train.beside_optimizer import LossScale, RouterBiases
from framework.train.stage import RankStage, StepInputs
from framework.train.sums import NO_LIMITS, Flags, SpikeLimits, StepSums, StepValues
from framework.train.update import OwnedShard, StepOptimizer
from framework.train.validation import Evaluation, Validation, ValidationLoss

NO_FLAGS = Flags()


@dataclass(frozen=True)
class TrainedParameter:
    """A trained parameter of one stage of this rank. index: its number among all trained parameters of the whole model."""

    buffer: UnitBuffer
    slot: Slot
    view: MainGradView
    index: int


@dataclass(frozen=True)
class TrainingRun:
    """The objects that a rank trains with. `buffers`, `counted_rows`, `trained` and `held` never change: they are found at the
    first step and kept."""

    stages: dict[int, RankStage]  # of this rank, by number
    pipeline: PipelinePlan
    optimizer: StepOptimizer
    disk: DiskStates | None  # states that live on a disk
    shards: list[OwnedShard]  # of the optimizer
    # Buffers of one parameter in two stages of this rank; the second of each pair has the gradients of its own stage only.
    tied_copies: list[tuple[UnitBuffer, UnitBuffer]]
    parameter_index: dict[str, int]  # a number for each trained parameter of the whole model, equal on all ranks
    activations: ActivationSpec  # of the messages from stage to stage
    loss: LossSettings
    load: ExpertLoad
    biases: RouterBiases
    loss_scale: LossScale  # 1 in every dtype but fp16
    exposed_communication: ExposedCommunication
    mesh: Mesh
    leaves_base: bool  # checkpoints have no frozen parameters: those are read from where they come from
    clip_norm: float | None
    seed: int

    def close(self) -> None:
        """Remove the file of the states that live on a disk, if there is one."""
        if self.disk is not None:
            self.disk.close()

    @property
    def objective(self) -> Objective:
        return LOSSES[self.loss.name]

    @cached_property
    def hashes(self) -> BitHash:
        return BitHash(self.mesh.device)

    @cached_property
    def buffers(self) -> list[UnitBuffer]:
        return [buffer for stage in self.stages.values() for buffer in stage.buffers]

    @cached_property
    def saved_buffers(self) -> list[UnitBuffer]:
        """The buffers that checkpoints have."""
        return [buffer for buffer in self.buffers if buffer.is_trained or not self.leaves_base]

    @cached_property
    def counted_rows(self) -> list[Tensor]:
        """The rows (`norm_rows`) of the elements that this rank counts of the reduced global gradient: views."""
        trained = (buffer for buffer in self.buffers if buffer.is_trained)
        return norm_rows(elements for buffer in trained for elements in buffer.counted_elements(buffer.reduced))

    @cached_property
    def trained(self) -> list[TrainedParameter]:
        """A parameter is here twice if two stages of this rank have it."""
        return [
            TrainedParameter(buffer, slot, view, self.parameter_index[slot.name])
            for stage in self.stages.values()
            for buffer, slot, view in stage.gradients.grad_views
        ]

    @cached_property
    def held(self) -> Tensor:
        """[trained parameters of the model] fp64 on the device: 1 for each that this rank trains."""
        held = torch.zeros(len(self.parameter_index), dtype=torch.float64)
        held[torch.tensor([each.index for each in self.trained], dtype=torch.int64)] = 1
        return upload(held, self.mesh.device)


@dataclass(frozen=True)
class StepResult:
    """The result of a step, equal on all ranks but for `timed`: this rank's actions with their times, by its host's clock.

    loads: of experts, until the next step (`ExpertLoad.sum_over_ranks`); None without experts, or where they are not counted.
    hashed: this rank's parameters as the step has read them, where they are compared.
    """

    sums: StepSums
    timed: tuple[Timed, ...]
    loads: Tensor | None = None
    hashed: Sequence[Hashed] = ()

    def copy_to_host(self) -> AsyncHostCopy:
        """Start to bring the values to the host: `StepValues.unpack` reads them."""
        return AsyncHostCopy(self.sums.vector)

    def read(self) -> StepValues:
        """The values, once the device has them."""
        return StepValues.unpack(self.copy_to_host().values())


def train_step(
    run: TrainingRun,
    microbatches: Sequence[Microbatch],
    step: int,
    lr: float,
    flags: Flags = NO_FLAGS,
    validation: Validation | None = None,
    is_reported: bool = False,
    limits: SpikeLimits = NO_LIMITS,
    is_compared: bool = False,
    clock: Callable[[], float] = time.perf_counter,
) -> StepResult:
    """Forward, backward, reduce, clip, update. Collective over the world.

    microbatches: this rank's share of the batch, equally many on all ranks. flags: requests of this rank to all of them. The loss
    is of the whole batch, the norm that of its gradient before clipping. is_reported: count the load of experts. limits: above
    them nothing is updated; equal on all ranks. is_compared: hash parameters, for `check_replicas` behind the step. clock:
    of the actions' times.

    The framework does not wait for the device here, but for `parallel.ep`: once per layer and forward the host must know how many
    rows it receives, unless they are padded. Where attention is left to transformers, its masks wait to know whether positions
    restart.

    validation: of the weights before the update: in the step's bubbles, and the rest right before the update.
    """
    batch_axis = run.mesh.axis("batch")
    validation = validation or Validation(())
    own = _complete(run, to_device(run, microbatches), is_step=True)
    filling = _take(run, validation, run.pipeline.room(len(own)))
    num_tokens = torch.stack([run.objective.count(each.labels, each.pairs) for each in own]).sum()
    # No rank waits for the count before a loss needs it.
    counting = start_all_reduce(num_tokens, batch_axis)
    seeds = [(run.seed, "dropout", step, index * batch_axis.size + batch_axis.rank) for index in range(len(own))]
    for stage in run.stages.values():
        stage.gradients.start_step()
    run.load.start_step(is_reported)
    scale = run.loss_scale.value
    # Ranks of `cp` have slices of the same microbatches: other random numbers, but no more of them.
    num_microbatches = len(own) * run.mesh.axis("dp").size
    inputs = StepInputs([*own, *filling], seeds, num_tokens, num_microbatches, scale, counting)
    losses, timed = _execute(run, inputs, clock)
    metrics = torch.stack([stage.metrics for stage in run.stages.values()]).sum(0)  # of the last stage alone
    counting.wait()
    validation.add(filling, losses[len(own) :], run.objective.count)
    validation.num_free += len(filling)
    for stage in run.stages.values():
        stage.gradients.finish()
    sum_over_stages([stage.gradients for stage in run.stages.values()], run.exposed_communication)
    run_alone(run, validation)
    for buffer, copy in run.tied_copies:
        buffer.reduced.add_(copy.reduced)
    for buffer, copy in run.tied_copies:  # behind all sums: a buffer may have several copies
        copy.reduced.copy_(buffer.reduced)
        for each in (buffer, copy):
            each.start_delivery()  # what has started before is of one stage alone
    loss = torch.stack(losses[: len(own)]).sum() if losses else torch.zeros((), device=run.mesh.device)
    loads = run.load.sum_over_ranks()
    missed = [each for each in run.trained if not each.view.is_reached]
    sums = _sum(run, loss, flags, limits, metrics, missed)
    # The parameters that forward and backward have read: the update invalidates them.
    stages = run.stages.values() if is_compared else ()
    hashed = [each for stage in stages for each in hash_parameters(stage.parameters, run.hashes)]
    _update(run, sums, missed, lr, step, loads)
    # Nothing crosses a step: also on a rank whose data has left out a part of the model.
    run.mesh.waits.check_ended(f"step {step}")
    return StepResult(sums, timed, loads, hashed)


def _execute(
    run: TrainingRun, inputs: StepInputs, clock: Callable[[], float] = time.perf_counter
) -> tuple[list[Tensor], tuple[Timed, ...]]:
    """Run the lowered schedule. Returns the results by microbatch if this rank has the last stage: shares of the batch's loss,
    scalars, of microbatches to train on, of those of validation what they ask for; and the actions with their times."""
    axis, num_trained = run.mesh.axis("pp"), len(inputs.seeds)
    lowered = run.pipeline.lowered(num_trained, len(inputs.microbatches) - num_trained)
    links = StageLinks(axis, lowered, run.activations)
    for stage in run.stages.values():
        stage.start_step(inputs)
    losses, timed = execute(lowered, axis.rank, run.stages, links, clock)
    return [losses[index] for index in sorted(losses)], tuple(timed)


def _sum(
    run: TrainingRun,
    loss: Tensor,
    flags: Flags,
    limits: SpikeLimits,
    metrics: Tensor,
    missed: Sequence[TrainedParameter],
) -> StepSums:
    """Sum loss, norm, flags and metrics over the world. missed: parameters that this rank's backward has not reached."""
    # The loss is on all ranks of tp.
    terms = loss / run.mesh.axis("tp").size, squared_norm(run.counted_rows, run.mesh.device)
    sums = StepSums.pack(*terms, flags, _find_reached(run, missed), limits, metrics, run.mesh.device)
    all_reduce(sums.terms, run.mesh.axis("world"), label="sums of the step")
    sums.take_norm(run.loss_scale.value)
    return sums


def _update(
    run: TrainingRun, sums: StepSums, missed: Sequence[TrainedParameter], lr: float, step: int, loads: Tensor | None
) -> None:
    """Clip and update, unless loss or norm is not finite or above its limit. loads: of experts."""
    divisor = clip_divisor(sums.norm, run.clip_norm) * run.loss_scale.value
    for stage in run.stages.values():
        stage.parameters.invalidate()
    is_finite = sums.loss.isfinite() & sums.norm.isfinite()
    run.loss_scale.update(is_finite)
    # On the device: the host reads this step when it has sent the next.
    is_taken = is_finite & sums.are_within_limits
    run.optimizer.wait_for_readers()  # a bias may be a master that is being saved
    # Before the update, which sends masters to the parameters: no gradient reaches a bias, so it is left as it is then.
    run.biases.update(loads, is_taken)
    run.optimizer.step(lr, divisor, ~is_taken, step, _missed_elements(run, missed, sums.reached))


def refuse_overflow(run: TrainingRun, padding: float | None, step: int) -> None:
    """Raise RecipeError on all ranks if rows have found no room in the buffers of experts, which makes a step not finite, so that
    it updates nothing. padding: parallel.expert_padding. Collective over the world with it."""
    if padding is None:
        return
    found = [each for stage in run.stages.values() for each in find_needed_padding(stage.model.model)]
    most = torch.stack([torch.zeros((), dtype=torch.float64, device=run.mesh.device), *found]).max()
    all_reduce(most, run.mesh.axis("world"), "max", label="needed padding")
    if (needed := most.item()) > 0:
        raise RecipeError(
            f"parallel.expert_padding={padding}: in step {step:,} routers chose up to {needed:.2f} times an even share of experts"
            f" for one rank, and its buffers have no room for so many rows; no update was made of the step: go on with"
            f" parallel.expert_padding={ceil(needed * 10) / 10} or more, or null, which waits for the numbers of rows"
        )


def _find_reached(run: TrainingRun, missed: Sequence[TrainedParameter]) -> Tensor:
    """[trained parameters of the model] fp64: 1 for each that this rank's backward has reached."""
    if not missed:
        return run.held
    reached = run.held.clone()
    anyway = {each.index for each in run.trained if each.view.is_reached}
    for index in {each.index for each in missed} - anyway:
        reached[index].zero_()
    return reached


def _missed_elements(run: TrainingRun, missed: Sequence[TrainedParameter], reached: Tensor) -> list[Missed]:
    """The elements of the optimizer's shards that this rank's own backward missed in this step. Stock optimizers leave elements
    that no rank's backward has reached alone, decay included; only the device knows whether another rank reached them."""
    return [
        Missed(
            owned.shard,
            max(each.slot.start, owned.span.start) - owned.span.start,
            min(each.slot.stop, owned.span.stop) - owned.span.start,
            reached[each.index] > 0,
        )
        for each in missed
        for owned in run.shards
        if owned.buffer is each.buffer and max(each.slot.start, owned.span.start) < min(each.slot.stop, owned.span.stop)
    ]


def run_alone(run: TrainingRun, validation: Validation) -> None:
    """Run what is left of a validation, forwards only."""
    while filling := _take(run, validation, FORWARDS_AT_ONCE):
        results, _ = _execute(run, _without_training(run, filling))
        validation.add(filling, results, run.objective.count)


def evaluate(run: TrainingRun, plan: Plan, evaluation: Evaluation) -> dict[str, float]:
    """The scores of a run's weights by TASK/NAME, by forwards alone. Collective."""
    validation = Validation(evaluation.microbatches(plan, run.mesh))
    run_alone(run, validation)
    return evaluation.judge(validation, run.mesh)


def score(run: TrainingRun, microbatches: Sequence[Microbatch], with_adapters: bool = True) -> list[Tensor]:
    """The log-probabilities of the answers of microbatches on the device, [b, S] each, without dropout; none on a rank without
    the last stage. Collective. with_adapters: else of the frozen model under them."""
    for stage in run.stages.values():
        stage.adapters.is_on = with_adapters
    asking, found = [replace(each, asks="answers") for each in microbatches], []
    # In parts: ranks of a pipeline hold what they have sent until all of a part is through.
    for first in range(0, len(asking), FORWARDS_AT_ONCE):
        found += _execute(run, _without_training(run, asking[first : first + FORWARDS_AT_ONCE]))[0]
    for stage in run.stages.values():
        stage.adapters.is_on = True
    return found


def _without_training(run: TrainingRun, microbatches: Sequence[Microbatch]) -> StepInputs:
    nothing = torch.zeros((), dtype=torch.int64, device=run.mesh.device)
    return StepInputs(microbatches, (), nothing, 0, run.loss_scale.value)


def _complete(run: TrainingRun, microbatches: list[Microbatch], is_step: bool) -> list[Microbatch]:
    """Microbatches with what their loss compares with, where only other forwards give it: the log-probabilities of the frozen
    model, and kto's divergence of the model as it is now, in a step that of the whole batch, else of each row."""
    if run.loss.reference == "base" and microbatches:
        microbatches = _with_pairs(microbatches, "reference", score(run, microbatches, with_adapters=False))
    if run.loss.name == "kto" and microbatches:
        scores = score(run, microbatches)
        terms = [_sum_probes(each, log_p) for each, log_p in zip(microbatches, scores, strict=bool(scores))]
        if is_step and terms:
            total = torch.cat(terms, 1).sum(1, keepdim=True)
            all_reduce(total, run.mesh.axis("batch"), label="divergence of a step")
            terms = [total.expand_as(each) for each in terms]
        divergences = [(sums / counts.clamp(min=1)).clamp(min=0)[:, None] for sums, counts in terms]
        microbatches = _with_pairs(microbatches, "divergence", divergences)
    return microbatches


def _sum_probes(microbatch: Microbatch, log_p: Tensor) -> Tensor:
    """The sum of p - p_ref over the probes of each row, and their number: [2, b].  log_p: [b, S]."""
    pairs = microbatch.pairs
    assert pairs is not None and pairs.reference is not None, "rows of pairs with a reference"  # noqa: PT018
    is_probe = pairs.kinds == PROBE
    ratio = (log_p - pairs.reference.to(log_p.dtype)).where(is_probe, 0.0)
    return torch.stack([ratio.sum(1), is_probe.sum(1).to(ratio.dtype)])


def _with_pairs(microbatches: list[Microbatch], name: str, values: list[Tensor]) -> list[Microbatch]:
    """Microbatches with a tensor of their pairs; as they are on a rank without the last stage, which has no values."""
    found = zip(microbatches, values, strict=True) if values else ()
    return [replace(each, pairs=replace(each.pairs, **{name: own})) for each, own in found] or microbatches  # type: ignore[type-var]


def validate_average(run: TrainingRun, validation: Validation) -> ValidationLoss:
    """Validate the average of the weights in their place, forwards only. Collective over the world."""
    averages = run.optimizer.averages
    assert averages is not None, "there is no average to validate"
    run.optimizer.wait_for_readers()
    with averages.in_place_of_values():
        _publish(run)
        run_alone(run, validation)
        # Read here: copies from a host's memory to the device must have ended before that memory changes again.
        means = validation.means(run.mesh)
    _publish(run)
    return means


def _publish(run: TrainingRun) -> None:
    """Have forward read the masters as they are now."""
    for stage in run.stages.values():
        stage.parameters.invalidate()
    for buffer in run.buffers:
        buffer.copy_master_to_params()


def _take(run: TrainingRun, validation: Validation, most: int) -> list[Microbatch]:
    taken = to_device(run, validation.take(most))
    num_losses = sum(each.asks == "loss" for each in taken)  # in front of those of an evaluation
    return _complete(run, taken[:num_losses], is_step=False) + taken[num_losses:]


def to_device(run: TrainingRun, microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    """Copies of microbatches on the device."""
    return [each.map(partial(upload, device=run.mesh.device)) for each in microbatches]
