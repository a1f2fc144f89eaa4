"""Ways to train side by side: same model, same data, same processes, step by step. What the benchmarks of this folder share.

Method. All sides live in one set of gloo processes with one thread each, start from the same weights on disk, and take
the same optimizer steps on the same tokens. In each round every side takes one step, in an order that rotates by one per
round, each step between two barriers; so what disturbs the machine disturbs all alike. A round gives one ratio per side,
wall time of the side over wall time of the reference; reported is the median over the rounds, with the quartiles. CPU
seconds are of the whole process, averaged over ranks. The loss of each step must agree with the reference's.
"""

import ctypes
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import transformers
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from framework.comm.communicator import Communicator
from framework.comm.connect import Mesh, connect
from framework.comm.objects import all_gather_object
from framework.data.pack import Microbatch, cut_context
from framework.mesh.topology import Topology
from framework.model.load import load_config
from framework.plan.plan import make_plan
from framework.recipe import schema
from framework.train.build import build
from framework.train.step import train_step

MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
LR, BETAS, EPS, WEIGHT_DECAY = 3e-4, (0.9, 0.95), 1e-8, 0.1
WARMUP_ROUNDS = 2
MEMORY_STEPS = 4
PROFILED_STEPS = 5
DATA_PARALLEL = schema.Parallel()
ONE_STAGE = schema.Pipeline()


@dataclass(frozen=True)
class Case:
    """Microbatches per rank and step, sequences in each, tokens in a sequence."""

    accumulation: int
    sequences: int
    context: int

    @classmethod
    def parse(cls, text: str) -> "Case":
        """`BxT`, or `AxBxT` with A accumulated microbatches."""
        *accumulation, sequences, context = (int(part) for part in text.split("x"))
        return cls(accumulation[0] if accumulation else 1, sequences, context)

    def __str__(self) -> str:
        prefix = f"{self.accumulation} accumulated of " if self.accumulation > 1 else ""
        return f"{prefix}{self.sequences} x {self.context}"


@dataclass(frozen=True)
class Setting:
    """Values that a rank needs to build any side.

    precision: fp32, or bf16 with fp32 master weights and fp32 gradient sums. tp: neighbours that take the same tokens. pp: ranks
    of a pipeline, which take the same tokens too. model: of the family's config.
    """

    case: Case
    world: int
    rank: int
    steps: int
    clip_norm: float | None
    weights: str
    scratch: str
    precision: str = "fp32"
    tp: int = 1
    pp: int = 1
    model: dict[str, Any] = field(default_factory=MODEL.copy)
    family: str = "llama"

    @property
    def dp(self) -> int:
        return self.world // (self.pp * self.tp)

    @property
    def topology(self) -> Topology:
        return Topology(pp=self.pp, dp=self.dp, tp=self.tp, shard=self.dp)


class Side(Protocol):
    """One way to train. `step` takes this rank's microbatches and returns its loss; `is_global`: that of all ranks."""

    is_global: bool

    def step(self, microbatches: Sequence[Microbatch]) -> float: ...

    def close(self) -> None: ...


# Builds the side of a name. A top-level function, so that spawned ranks find it.
Builder = Callable[[str, Setting, Mesh, Tensor], Side]


def tokens_of(setting: Setting) -> Tensor:
    """All tokens of the run: [sequences, context + 1], sample j of microbatch m of data-parallel rank r at (m * dp + r) * b + j.

    Drawn by Zipf's law, which a model learns within a few steps: equal losses then say that the updates are equal too.
    """
    sequences = setting.steps * setting.case.accumulation * setting.dp * setting.case.sequences
    shares = 1.0 / torch.arange(1, setting.model["vocab_size"] + 1)
    draws = torch.multinomial(
        shares, sequences * (setting.case.context + 1), replacement=True, generator=torch.Generator().manual_seed(0)
    )
    return draws.view(sequences, -1)


def microbatches_of(setting: Setting, tokens: Tensor, step: int) -> list[Microbatch]:
    """This rank's share of a step."""
    case = setting.case
    shares = tokens.view(setting.steps, case.accumulation, setting.dp, case.sequences, -1)
    shares = shares[step, :, setting.topology.index("dp", setting.rank)]
    return [Microbatch(share[:, :-1].contiguous(), share[:, 1:].contiguous(), None) for share in shares]


def stock_model(setting: Setting, **options: Any) -> PreTrainedModel:
    """Hugging Face's model with the weights that every side starts from, ready to train. options: of `from_pretrained`."""
    return AutoModelForCausalLM.from_pretrained(setting.weights, dtype=torch.float32, **options).train()


def decay_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]


class Loop:
    """The loop that everyone writes, around a model that is wrapped or not."""

    is_global = False

    def __init__(
        self,
        setting: Setting,
        wrap: Callable[[torch.nn.Module], torch.nn.Module],
        make_optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    ):
        """make_optimizer: from parameter groups; None for fused AdamW."""
        self.model = wrap(self.load(setting))
        self.optimizer = (make_optimizer or make_adamw)(decay_groups(self.model))
        self._setting = setting

    def load(self, setting: Setting) -> PreTrainedModel:
        """The model that is wrapped."""
        return stock_model(setting)

    def step(self, microbatches: Sequence[Microbatch]) -> float:
        total = 0.0
        for index, each in enumerate(microbatches):
            with self.synchronising(index == len(microbatches) - 1), self.autocasting():
                output = self.model(
                    each.input_ids,
                    position_ids=each.position_ids,
                    labels=each.labels,
                    shift_labels=each.labels,
                    use_cache=False,
                )
                loss = output.loss / len(microbatches)
                loss.backward()
            total += loss.item()
        if self._setting.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._setting.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def synchronising(self, is_last: bool) -> Any:
        """Ranks exchange gradients in the last backward only."""
        return nullcontext() if is_last or not isinstance(self.model, DistributedDataParallel) else self.model.no_sync()

    def autocasting(self) -> Any:
        """bf16 as torch offers it for models whose parameters stay fp32."""
        return torch.autocast("cpu", torch.bfloat16) if self._setting.precision == "bf16" else nullcontext()

    def close(self) -> None:
        """Nothing to end."""


def make_adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS, fused=True)


def wrap_ddp(model: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


class Ours:
    """A run as `meshwright train` builds it, from the same weights, without its observers and its loader."""

    is_global = True

    def __init__(
        self,
        setting: Setting,
        mesh: Mesh,
        zero: schema.Zero,
        parallel: schema.Parallel = DATA_PARALLEL,
        pipeline: schema.Pipeline = ONE_STAGE,
    ):
        case = setting.case
        recipe = schema.Recipe(
            train=schema.Train(steps=setting.steps),
            batch=schema.Batch(
                sequences_per_step=case.sequences * case.accumulation * setting.dp,
                sequences_per_microbatch=case.sequences,
                context=case.context,
            ),
            model=schema.Model(family=setting.family, config=setting.model, weights=setting.weights),
            precision=schema.Precision(compute=setting.precision),  # type: ignore[arg-type]
            optim=schema.Optim(
                lr=LR,
                betas=BETAS,
                eps=EPS,
                weight_decay=WEIGHT_DECAY,
                clip_norm=setting.clip_norm,
                schedule=schema.LearningRateSchedule(name="constant"),
            ),
            zero=zero,
            parallel=parallel,
            pipeline=pipeline,
            launch=schema.Launch(ranks=setting.world, device="cpu"),
        )
        plan = make_plan(recipe, load_config(recipe.model))
        self.run = build(plan, mesh_over(mesh, plan.topology))
        self._slices = plan.context_slices(mesh.rank)
        self._step = 0

    def step(self, microbatches: Sequence[Microbatch]) -> float:
        own = [cut_context(each, self._slices) for each in microbatches]
        result = train_step(self.run, own, self._step, LR)
        self._step += 1
        return result.read().loss

    def close(self) -> None:
        """Nothing to end."""


def mesh_over(mesh: Mesh, topology: Topology) -> Mesh:
    """Another topology's mesh over the process group of this one: each axis is of all ranks, or of one."""
    world = mesh.axis("world")
    axes = topology.axes(mesh.rank)
    assert all(axis.size in (1, world.size) for axis in axes.values()), f"{topology} needs groups of its own"
    group = world.group if world.size > 1 else None
    return replace(
        mesh,
        topology=topology,
        axes={name: Communicator(axis, group) if axis.size > 1 else Communicator(axis) for name, axis in axes.items()},
    )


def measure(setting: Setting, build_side: Builder, names: list[str], rendezvous: str, results: Path) -> None:
    """One rank: every side takes every step; rank 0 writes wall seconds, CPU seconds and losses per side and round."""
    mesh = join(setting, rendezvous)
    tokens = tokens_of(setting)
    sides = {name: build_side(name, setting, mesh, tokens) for name in names}
    wall_s: dict[str, list[float]] = {name: [] for name in names}
    cpu_s: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for step in range(setting.steps):
        microbatches = microbatches_of(setting, tokens, step)
        first = step % len(names)
        for name in names[first:] + names[:first]:
            wall, cpu, loss = time_step(sides[name], microbatches, setting.world)
            wall_s[name].append(wall)
            cpu_s[name].append(cpu)
            losses[name].append(loss)
    if setting.rank == 0:
        results.write_text(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "losses": losses}))
    for side in sides.values():
        side.close()
    mesh.close()


def join(setting: Setting, rendezvous: str) -> Mesh:
    """This process becomes a rank."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if setting.world > 1:  # how libraries find the process group that `connect` makes
        rank, world = str(setting.rank), str(setting.world)
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return connect(setting.topology, torch.device("cpu"), rendezvous, setting.rank)


def time_step(side: Side, microbatches: list[Microbatch], world: int) -> tuple[float, float, float]:
    """(wall seconds from barrier to barrier, CPU seconds averaged over ranks, loss of the whole batch)."""
    if world > 1:
        dist.barrier()
    cpu_start, start = time.process_time(), time.perf_counter()
    loss = side.step(microbatches)
    cpu = time.process_time() - cpu_start
    if world > 1:
        dist.barrier()
    wall = time.perf_counter() - start
    both = torch.tensor([cpu, loss], dtype=torch.float64)
    if world > 1:
        dist.all_reduce(both)
        both /= world
    return wall, both[0].item(), loss if side.is_global else both[1].item()


def run_ranks(program: Callable[..., None], setting: Setting, *args: Any) -> Any:
    """Run `program(setting, *args, rendezvous, results)` on all ranks of the setting; what rank 0 wrote into `results`."""
    with tempfile.TemporaryDirectory() as scratch:
        results, context = Path(scratch) / "results.json", multiprocessing.get_context("spawn")
        settings = [replace(setting, rank=rank, scratch=scratch) for rank in range(setting.world)]
        ranks = [
            context.Process(target=program, args=(each, *args, f"file://{scratch}/rendezvous", results))
            for each in settings
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"{setting}: exit codes {[rank.exitcode for rank in ranks]}")
        return json.loads(results.read_text())


def measure_memory(setting: Setting, build_side: Builder, name: str, rendezvous: str, results: Path) -> None:
    """One rank: the peak resident memory of some steps after the first, and before anything was built, in bytes; rank 0 writes
    those of all."""
    mesh = join(setting, rendezvous)
    tokens = tokens_of(setting)
    before = read_status("VmRSS")
    side = build_side(name, setting, mesh, tokens)
    side.step(microbatches_of(setting, tokens, 0))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what building left with the allocator is nobody's
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far was of building: start it anew
    for step in range(1, setting.steps):
        side.step(microbatches_of(setting, tokens, step))
    found = all_gather_object((before, read_status("VmHWM")), mesh.axis("world"))
    if setting.rank == 0:
        results.write_text(json.dumps(found))
    side.close()
    mesh.close()


def profile(setting: Setting, build_side: Builder, name: str, rendezvous: str, results: Path) -> None:
    """One rank: the operators of a few steps, by their own time; rank 0 writes its own."""
    mesh = join(setting, rendezvous)
    tokens = tokens_of(setting)
    side = build_side(name, setting, mesh, tokens)
    for step in range(WARMUP_ROUNDS):
        side.step(microbatches_of(setting, tokens, step))
    with torch.profiler.profile() as profiler:
        for step in range(WARMUP_ROUNDS, WARMUP_ROUNDS + PROFILED_STEPS):
            side.step(microbatches_of(setting, tokens, step))
    if setting.rank == 0:
        results.write_text(json.dumps(profiler.key_averages().table("self_cpu_time_total", row_limit=45)))
    side.close()
    mesh.close()


def read_status(key: str) -> int:
    """A size in /proc/self/status, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return 1024 * int(line.split()[1])


def print_memory(setting: Setting, build_side: Builder, names: Sequence[str]) -> None:
    """Each side in ranks of its own."""
    print("| side | peak resident MiB of each rank | above the empty rank |\n|---|---|---|", flush=True)
    for name in names:
        found = run_ranks(measure_memory, replace(setting, steps=MEMORY_STEPS), build_side, name)
        peaks = ", ".join(f"{peak / 2**20:.0f}" for _, peak in found)
        above = ", ".join(f"{(peak - before) / 2**20:.0f}" for before, peak in found)
        print(f"| {name} | {peaks} | {above} |", flush=True)


def table(setting: Setting, measured: dict, against: str, tolerance: float) -> list[str]:
    """Rows of the markdown table; the ratio is a side's wall time over that of `against`, round by round."""
    rows = []
    for name in measured["wall_s"]:
        wall, cpu = measured["wall_s"][name][WARMUP_ROUNDS:], measured["cpu_s"][name][WARMUP_ROUNDS:]
        ratios = [mine / theirs for mine, theirs in zip(wall, measured["wall_s"][against][WARMUP_ROUNDS:], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        losses = measured["losses"][name]
        pairs = zip(losses, measured["losses"][against], strict=True)
        error = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
        verdict = "" if error <= tolerance else " DIFFERS"
        rows.append(
            f"| {setting.case} | {setting.world} | {name} | {statistics.median(wall) * 1e3:.0f} "
            f"| {statistics.median(cpu) * 1e3:.0f} | {middle:.3f} ({low:.3f} to {high:.3f}) "
            f"| {losses[0]:.3f} to {losses[-1]:.3f}, {error:.0e}{verdict} |"
        )
    return rows


def title(against: str) -> str:
    return (
        f"| microbatch | ranks | side | wall ms | CPU ms per rank | wall over {against} (quartiles) | loss, relative error |\n"
        "|---|---|---|---|---|---|---|"
    )


def save_weights(folder: str, model: dict[str, Any] = MODEL, family: str = "llama") -> None:
    """The weights that every side starts from."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **model)).save_pretrained(folder)


def parse_clip_norm(text: str) -> float | None:
    return None if text == "none" else float(text)
