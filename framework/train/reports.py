"""The observers of rank 0 and their input: the description of the run, and a report of each step from its sums and the ranks'
times.
"""

import resource
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

from framework.checkpoint.save import Saver
from framework.comm.communicator import ExposedWait
from framework.comm.connect import Mesh
from framework.comm.objects import gather_numbers
from framework.comm.transfer import AsyncHostCopy
from framework.data.prepared import Prepared
from framework.data.tokenize import decode_start
from framework.host import is_named, peak_flops
from framework.launch.nodes import describe_nodes, read_order
from framework.launch.resume import name_run
from framework.lease import Lease
from framework.model.mixtures import read_loads
from framework.monitor.goodput import Goodput
from framework.monitor.progress import name_coordinates
from framework.monitor.stragglers import WINDOW, Stragglers
from framework.monitor.watchdog import Watchdog
from framework.optim.optimizers import estimate_noise_scale
from framework.plan.forecast_plan import forecast_cut
from framework.plan.plan import Plan
from framework.recipe.environment import describe_public
from framework.recipe.overrides import write_resume
from framework.recipe.plugins import ADDED
from framework.recipe.schema import Cluster, Recipe
from framework.recipe.stages import split_stages
from framework.track.console import Console
from framework.track.jsonl import LOADS_FILE, Jsonl, loads_of
from framework.track.mirror import Mirror
from framework.track.report import Observer, Observers, RunInfo, StepReport, save_run_info
from framework.track.summary import Summary
from framework.train.state import RunState
from framework.train.step import TrainingRun
from framework.train.sums import SpikeLimits, StepValues
from framework.train.validation import NOT_VALIDATED, Validated

_STATUS = Path("/proc/self/status")
# The number of tokens at the data's beginning that make the prompt of a suggested command.
PROMPT_TOKENS = 24


class StepTimes(NamedTuple):
    """One rank's seconds of a step, by its host's clock."""

    busy_s: float  # without waiting for data
    data_wait_s: float
    computed_s: float  # in actions of the pipeline
    span_s: float  # from the first microbatch at hand to the end of the last action
    waited_s: float  # for other ranks
    own_s: float  # busy, and not waiting for other ranks


@dataclass(frozen=True)
class PendingStep:
    """A step that has been sent to the device and not yet read."""

    sums: AsyncHostCopy
    step: int
    samples: int  # after it, as `tokens`
    tokens: int
    lr: float
    limits: SpikeLimits  # above which it is a spike
    seconds: float  # of this rank, as `times`
    times: StepTimes
    exposed: list[ExposedWait]  # of parameters and gradients
    waits: list[ExposedWait]  # of a GPU, for whatever comes from other ranks
    traffic: dict[str, dict[str, int]]
    loads: AsyncHostCopy | None  # of experts, flat
    squared_moment: AsyncHostCopy | None  # of this rank, after the step


class Reporter:
    """Reports steps to rank 0's observers. On all ranks, because each adds its times. watchdog: knows hosts, and prints lines."""

    def __init__(
        self,
        run: TrainingRun,
        plan: Plan,
        info: RunInfo,
        observers: Observers,
        saver: Saver,
        watchdog: Watchdog,
        goodput: Goodput | None = None,
    ) -> None:
        self.observers, self.goodput = observers, goodput or Goodput(watchdog.progress.phases)
        self._run, self._plan, self._info = run, plan, info
        self._saver, self._watchdog = saver, watchdog
        self._reported_stall_s = 0.0
        # Ranks with other stages have other work.
        topology = run.mesh.topology
        groups: dict[int, list[int]] = {}
        for rank in range(topology.world):
            groups.setdefault(topology.index("pp", rank), []).append(rank)
        self._stragglers = Stragglers(list(groups.values()))

    def report(
        self,
        pending: PendingStep,
        values: StepValues,
        state: RunState,
        validated: Validated = NOT_VALIDATED,
    ) -> None:
        """Report a step, with the validation of its weights if there was one. Collective.

        Only now are the ranks' times gathered, to rank 0, by the hosts: they have just read the sums of one all-reduce, so they
        are here at about the same time, while the device has the next step to do. In the sums of every step these would be four
        numbers for each rank.
        """
        own = find_device_times(pending, self._run.mesh.device)
        moment = pending.squared_moment.values() if pending.squared_moment is not None else []
        numbers = gather_numbers([*own, *moment], self._run.mesh.axis("world"))
        times = [StepTimes(*each[: len(own)]) for each in numbers]
        if times:  # on rank 0
            self._find_stragglers(pending, times)
            validation = {
                "validation_loss": None if validated.loss is None else validated.loss.mean,
                "validation_losses": self._name_losses(validated.loss.by_source if validated.loss else ()),
                "validation_free_fraction": validated.free_fraction,
                "average_validation_loss": validated.average,
                "scores": dict(validated.scores),
            }
            noise = sum(each[-1] for each in numbers) if moment else None
            self.observers.report(
                self._describe(pending, values, state, times, **validation, **self._describe_noise(state, noise))
            )

    def _describe(
        self, pending: PendingStep, values: StepValues, state: RunState, times: Sequence[StepTimes], **more: Any
    ) -> StepReport:
        tokens_per_s = self._plan.derived.tokens_per_step / pending.seconds
        return StepReport(
            step=pending.step,
            samples=pending.samples,
            tokens=pending.tokens,
            loss=values.loss,
            gradient_norm=values.gradient_norm,
            lr=pending.lr,
            step_s=pending.seconds,
            tokens_per_s=tokens_per_s,
            tokens_per_s_per_rank=tuple(self._plan.derived.tokens_of_rank / each.busy_s for each in times),
            data_wait_s=max(each.data_wait_s for each in times),
            pipeline_bubble=find_bubble(times),
            exposed_communication_s=sum(each.seconds for each in pending.exposed),
            mfu=mfu(tokens_per_s, self._info.flops_per_token or 0.0, self._info.world, self._info.peak_flops),
            memory_bytes=peak_memory_bytes(self._run.mesh.device),
            traffic=pending.traffic,
            skipped_steps=state.skipped_steps,
            spikes=state.spikes.count,
            loss_limit=pending.limits.loss if pending.limits.are_known else None,
            gradient_norm_limit=pending.limits.gradient_norm if pending.limits.are_known else None,
            rewinds=state.rewinds,
            skipped_samples=tuple((first, stop) for first, stop in state.skipped_samples),
            preference=self._describe_preference(values),
            source_losses=self._name_losses(values.metrics[len(self._run.objective.metrics) :]),
            loss_scale=values.loss_scale if self._plan.recipe.precision.compute == "fp16" else None,
            save_stall_s=self._take_stall(),
            failed_saves=self._saver.failures,
            stragglers={f"{rank} {phase}": excess_s for (rank, phase), excess_s in self._stragglers.slow.items()},
            goodput=self.goodput.shares(),
            **self._describe_experts(pending),
            **more,
        )

    def _describe_preference(self, values: StepValues) -> dict[str, float]:
        """The means of the loss's metrics, and the margin between rewards; none of next_token."""
        named = zip(self._run.objective.metrics, values.metrics, strict=False)
        found = {name: mean for name, mean in named if mean is not None}
        if {"reward_chosen", "reward_rejected"} <= found.keys():
            found["reward_margin"] = found["reward_chosen"] - found["reward_rejected"]
        return found

    def _describe_noise(self, state: RunState, squared_moment: float | None) -> dict[str, Any]:
        """The gradient noise scale after the step, by name; none where it is not asked for."""
        if squared_moment is None:
            return {}
        beta, mean = self._plan.recipe.optim.betas[0], state.squared_norms or 0.0
        scale = estimate_noise_scale(mean, squared_moment, beta, state.num_updates)
        return {"noise_scale_tokens": None if scale is None else scale * self._plan.derived.tokens_per_step}

    def _find_stragglers(self, pending: PendingStep, times: Sequence[StepTimes]) -> None:
        """Print which ranks have become slow, or are so no longer."""
        data, own, waited = ([getattr(each, name) for each in times] for name in ("data_wait_s", "own_s", "waited_s"))
        for found in self._stragglers.add(pending.seconds, data, own, waited):
            host = self._watchdog.progress.hosts.get(found.rank, "")
            who = f"rank {found.rank} [{name_coordinates(self._run.mesh.topology, found.rank)}]{host and f' on {host}'}"
            if found.is_slow:
                self._watchdog.say(
                    f"{who} is slow in {found.phase}: {found.excess_s * 1e3:.0f} ms a step longer than {self._stragglers.others},"
                    f" {found.fraction:.0%} of a step (median of the last reported steps, at most {WINDOW})"
                )
            else:
                self._watchdog.say(f"{who} is no longer slow in {found.phase}")

    def _take_stall(self) -> float:
        """Seconds for which saves have stalled the loop since the last report."""
        former, self._reported_stall_s = self._reported_stall_s, self._saver.stalled_s
        return self._reported_stall_s - former

    def _describe_experts(self, pending: PendingStep) -> dict[str, Any]:
        """Values of the report about routers, by name; none for a dense model."""
        if pending.loads is None:
            return {}
        loads = read_loads(self._run.load.mixtures, pending.loads.values())
        imbalance = {layer: load.imbalance for layer, load in loads.items()}
        entropies = [load.entropy for load in loads.values() if load.entropy is not None]
        return {
            "expert_imbalance": imbalance,
            "expert_imbalance_max": max(imbalance.values()),
            "expert_imbalance_mean": fmean(imbalance.values()),
            "router_entropy": fmean(entropies) if entropies else None,
            "dropped_tokens": sum(load.dropped for load in loads.values()),
            "expert_loads": {layer: load.tokens for layer, load in loads.items()},
        }

    def _name_losses(self, found: Sequence[float | None]) -> dict[str, float]:
        """Losses by source, where there are several."""
        names = self._info.sources if len(self._info.sources) > 1 else ()
        return {name: loss for name, loss in zip(names, found, strict=False) if loss is not None}


def find_device_times(pending: PendingStep, device: torch.device) -> StepTimes:
    """The rank's times. On a GPU they are the device's, as its host only launches; its events have passed when the step's sums
    are read."""
    if device.type != "cuda":
        return pending.times
    busy_s, waited_s = pending.seconds - pending.times.data_wait_s, sum(each.seconds for each in pending.waits)
    return pending.times._replace(busy_s=busy_s, waited_s=waited_s, own_s=busy_s - waited_s)


def find_bubble(times: Sequence[StepTimes]) -> float:
    """Share of the ranks' time, until the last of them has ended its actions, in which they were idle."""
    longest = max(each.span_s for each in times)
    return 1.0 - sum(each.computed_s for each in times) / (len(times) * longest) if longest else 0.0


def describe_run(recipe: Recipe, plan: Plan, prepared: Prepared, mesh: Mesh, run_dir: Path, state: RunState) -> RunInfo:
    """The description of a run before its first step in a stage. recipe: of the run; plan, prepared: of the stage; state: from
    which it goes on."""
    named = name_run(run_dir, recipe.run)
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    run_id = str(named.id)
    run = f"{named.root}/{run_id}"
    prompt = find_prompt(recipe, prepared) if mesh.rank == 0 else ""
    said = ["--chat"] if recipe.data.has_conversations else ["--prompt", prompt]
    return RunInfo(
        run_id=run_id,
        config=describe_public(recipe),
        total_steps=recipe.train.steps,
        stages={each.name: each.start for each in split_stages(recipe) if each.name},
        start_step=state.step,
        start_tokens=state.tokens,
        data_step=state.data_step,
        tokens_per_step=plan.derived.tokens_per_step,
        accumulation=plan.derived.accumulation,
        world=plan.derived.world,
        degrees=plan.derived.degrees,
        device=device,
        model=plan.config.model_type,
        num_parameters=plan.size.total,
        num_parameters_active=plan.size.active,
        flops_per_token=plan.flops_per_token,
        peak_flops=find_peak(device, recipe.cluster),
        unigram_entropy=None if recipe.loss.is_paired else prepared.unigram_entropy,  # of tokens, not of pairs
        sources=tuple(source.name for source in prepared.sources),
        has_experts=bool(plan.mixtures),
        nodes=tuple(describe_nodes(read_order(plan.derived), partial(forecast_cut, plan))) if mesh.rank == 0 else (),
        commands={
            "resume": write_resume(recipe.launch.kind, named),
            "export": shlex.join(["meshwright", "export", run, "--to", f"{run_id}-model"]),
            "generate": shlex.join(["meshwright", "generate", run, *said]),
        },
    )


def open_observers(
    recipe: Recipe, run_dir: Path, run: RunInfo, lease: Lease | None = None, known: Sequence[Sequence[float]] = ()
) -> Observers:
    """Open the observers that the recipe selects, on rank 0; other ranks use `Observers()`. lease: of the run, None
    without a launcher. known: [step, loss, gradient norm] of the last steps."""
    console, lease = Console(), lease or Lease(run_dir)
    metrics = Jsonl(run_dir, lease=lease, known=known, every_steps=recipe.track.every_steps)
    # Closed in reverse order: the report is made of the files of the others, and the console has the last word.
    observers: list[Observer] = [console, metrics]
    if run.has_experts:
        observers.append(Jsonl(run_dir, file=LOADS_FILE, record_of=loads_of, lease=lease))
    mirrors: list[Mirror] = []
    added = [name for name, plugin in ADDED["tracker"].items() if plugin in recipe.plugins]
    for name in (*recipe.track.trackers, *added):
        mirrors.append(Mirror(name, run_dir, console.say, lease=lease, beside=mirrors))
    observers += mirrors
    observers.append(Summary(run_dir, console.say, lease))
    save_run_info(run_dir, run, lease)
    opened = Observers(observers, lease=lease)
    opened.open(run)
    return opened


def find_prompt(recipe: Recipe, prepared: Prepared) -> str:
    """A line that the model may be asked to continue: the recipe's, else the first words of what it is trained on."""
    if recipe.train.sample is not None:
        return next(iter(recipe.train.sample.splitlines()), "")
    stream = max(prepared.sources, key=lambda source: source.weight).streams["train"]
    return decode_start(prepared.tokenizer, stream.read(0, min(stream.num_tokens, PROMPT_TOKENS)))


def mfu(tokens_per_s: float, flops_per_token: float, num_devices: int, peak: float | None) -> float | None:
    """Share of the peak of all devices, 0 to 1, that useful FLOPs reach; None without a known peak."""
    return None if peak is None else tokens_per_s * flops_per_token / (num_devices * peak)


def find_peak(device_name: str, cluster: Cluster) -> float | None:
    """Dense bf16 peak of the GPU that the driver calls `device_name`: from the recipe's cluster if that has such GPUs, else
    from the makers' data sheets; None of a device in neither."""
    stated = cluster.matmul.get("bf16")
    if cluster.name is not None and stated is not None and is_named(cluster.device, device_name):
        return stated.peak_tflops * 1e12
    return peak_flops(device_name)


def peak_memory_bytes(device: torch.device) -> int:
    """CUDA: the most bytes that tensors held at once since the process began; CPU: the process's peak resident set.

    On Linux the kernel's VmHWM is read rather than `ru_maxrss`, which a process inherits from the one that started it: a
    small rank would show the memory of a large launcher.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if _STATUS.exists():
        for line in _STATUS.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, others KiB
