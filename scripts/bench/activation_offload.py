"""Activation offload on a CPU with copies that run beside the computation: a trace, and how much of them lies under it.

    chrt -r 5 python scripts/bench/activation_offload.py [--fractions 1.0 0.75] [--link GB/s] [--trace FILE.json.gz]

A GPU copies on streams of its own. Here a thread does it for each direction, on the second core: `start` returns at once, `wait`
blocks the computation until the copy is done. All else is the framework's: a Llama's training steps on one rank and one thread,
with `ActivationOffload` around its layers. Losses and gradient norms must be those of the run without offload, in every bit.

The trace is torch.profiler's, of one step, for ui.perfetto.dev. The copies of a profiled step lie
  under layers   beside a layer's forward or backward, while that computes
  under others   beside head, loss and embedding, while those compute
  exposed        while the computation waits for a copy
Memory is fast beside these cores, so a copy takes a small part of a layer's time; --link makes it longer, as it is beside a GPU.
Both cores must be free of other work at real-time priority. Without offload malloc gives a step's memory back to the system and
gets it anew, at 2 us a page: MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=100000000000 keeps it, so that steps can be compared.
"""

import argparse
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function
from transformers.models.llama import LlamaConfig

from framework.comm.connect import connect
from framework.comm.transfer import CopyPair
from framework.data.pack import Microbatch
from framework.parallel.activation_offload import ActivationOffload, choose_offloaded
from framework.plan.plan import make_plan
from framework.recipe.schema import Batch, Launch, Memory, Precision, Recipe, Zero
from framework.train.build import build
from framework.train.profiler import UnitRanges
from framework.train.step import TrainingRun, train_step
from framework.verify.evidence import make_batches
from framework.verify.layout import share

CPU = torch.device("cpu")
DIRECTIONS = ("to the host", "to the device")

# (begin, end) in microseconds.
Interval = tuple[float, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512, help="of the one sequence of a step")
    parser.add_argument("--checkpointing", choices=("none", "full"), default="none")
    parser.add_argument(
        "--fractions", type=float, nargs="+", default=[1.0, 0.75], help="of the layers, one run for each"
    )
    parser.add_argument("--link", type=float, help="GB/s of a slower link, at which copies are held back")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--trace", type=Path, help="where the last step of the first fraction goes: FILE.json or FILE.json.gz"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)

    # Pinned: at real-time priority Linux was seen to leave a thread in the queue of a busy core for a tenth of a second, beside a
    # core without such threads.
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:1])

    sides = {fraction: Side(options, fraction, cores[-1:]) for fraction in (0.0, *options.fractions)}
    fractions = list(sides)
    for number in range(options.rounds + 1):
        first = number % len(fractions)
        for fraction in (*fractions[first:], *fractions[:first]):
            sides[fraction].time_step(keeps=number > 0)  # the first round touches new memory
    plain = sides.pop(0.0)
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores, {options.rounds} rounds")
    print(
        f"{options.layers} layers of width {options.hidden}, {options.tokens} tokens, fp32, activation checkpointing"
        f" {options.checkpointing}; without offload a step takes {median(plain.seconds) * 1e3:.0f} ms"
    )
    for fraction, side in sides.items():
        assert side.values == plain.values, "offload has changed a loss or a norm"
        shares = [side.profile_step() for _ in range(options.rounds)]
        side.report(fraction, plain, shares)
    if options.trace:
        next(iter(sides.values())).recorded.export_chrome_trace(str(options.trace))


class Side:
    """A run with a fraction of its layers offloaded. seconds: of a step by round; values: loss and norm of every step. recorded:
    the last step that was profiled."""

    def __init__(self, options: argparse.Namespace, fraction: float, cores: Sequence[int]):
        self.run, self._microbatches = build_run(options)
        self.offload = offload_with_threads(self.run, fraction, cores, options.link) if fraction else None
        self.seconds: list[float] = []
        self.values: list[float] = []
        self.recorded: profile

    def time_step(self, keeps: bool) -> None:
        """Take a step, and note what it took."""
        begin = perf_counter()
        self._take_step()
        if keeps:
            self.seconds.append(perf_counter() - begin)

    def profile_step(self) -> dict[str, "Shares"]:
        """Take a step, and say where the copies of each direction lie in it."""
        # Private, and the only way to record the ranges of other threads.
        everywhere = _ExperimentalConfig(profile_all_threads=True)
        with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as self.recorded:
            self._take_step()
        ranges = read_ranges(self.recorded)
        return {direction: Shares.measure(ranges, direction) for direction in DIRECTIONS}

    def _take_step(self) -> None:
        values = train_step(self.run, self._microbatches, len(self.values) // 2, 1e-3).read()
        self.values += [values.loss, values.gradient_norm]

    def report(self, fraction: float, plain: "Side", shares: "Sequence[Mapping[str, Shares]]") -> None:
        """Lines for people: medians over rounds, and of the step's ratio within a round."""
        assert self.offload is not None
        ratios = [mine / other for mine, other in zip(self.seconds, plain.seconds, strict=True)]
        print(
            f"\n{fraction:.2f} of the layers, {self.offload.pool.num_bytes / 1e6:.1f} MB on the host: a step takes"
            f" {median(self.seconds) * 1e3:.0f} ms, {median(ratios):.3f} of without ({min(ratios):.3f} to {max(ratios):.3f})"
        )
        for direction in DIRECTIONS:
            found = [each[direction] for each in shares]
            copied, layers, others, exposed, waited = (median(each) for each in zip(*map(astuple, found), strict=True))
            least = min(each.under_layers / each.copied for each in found)
            print(
                f"  {direction:13} {copied / 1e3:5.1f} ms of copies: {layers / copied:.1%} under layers (least {least:.1%}),"
                f" {others / copied:.1%} under others, {exposed / copied:.1%} exposed; compute waits {waited / 1e3:.2f} ms"
            )


@dataclass(frozen=True)
class Shares:
    """Where the copies of one direction lie in one step, in microseconds: `copied` is the sum of the next three. waited: all time
    in which the computation waits for them."""

    copied: float
    under_layers: float
    under_others: float
    exposed: float
    waited: float

    @classmethod
    def measure(cls, ranges: Sequence[tuple[str, Interval]], direction: str) -> "Shares":
        """ranges: what is named in a trace, and when."""
        copies = merge(when for name, when in ranges if name == f"copy {direction}")
        waits = merge(when for name, when in ranges if name.startswith("wait for a copy"))
        layers = overlap(copies, (when for name, when in ranges if name.startswith(("forward of", "backward of"))))
        copied, exposed = length(copies), length(overlap(copies, waits))
        under_layers = length(layers) - length(overlap(layers, waits))
        waited = length(when for name, when in ranges if name == f"wait for a copy {direction}")
        return cls(copied, under_layers, copied - under_layers - exposed, exposed, waited)


def read_ranges(recorded: profile) -> list[tuple[str, Interval]]:
    """Ranges that are named in a profile, of all threads."""
    return [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in recorded.events()
        if event.is_user_annotation
    ]


def build_run(options: argparse.Namespace) -> tuple[TrainingRun, list[Microbatch]]:
    """A rank alone, and the microbatch of all its steps."""
    config = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=options.hidden * 11 // 4, num_hidden_layers=options.layers,
        num_attention_heads=8, num_key_value_heads=4, vocab_size=2048, use_cache=False,
    )  # fmt: skip
    recipe = Recipe(
        batch=Batch(sequences_per_step=1, sequences_per_microbatch=1, context=options.tokens),
        zero=Zero(stage=0),
        memory=Memory(compile="never", activation_checkpointing=options.checkpointing),
        precision=Precision("fp32", "fp32", "fp32"),
        launch=Launch(ranks=1, device="cpu"),
    )
    plan = make_plan(recipe, config)
    mesh = connect(plan.topology, CPU, rank=0)
    run = build(plan, mesh)
    (batch,) = make_batches(config, 1, 1, options.tokens, seed=11)
    return run, share(batch, 1, mesh)


def offload_with_threads(
    run: TrainingRun, fraction: float, cores: Sequence[int], link: float | None
) -> ActivationOffload:
    """`memory.offload.activations` as on a GPU, with threads for streams; and the layers named in a trace."""
    (stage,) = run.stages.values()
    model = stage.model.model
    layers = {f"layers.{index}": layer for index, layer in enumerate(model.model.layers)}
    axis = run.mesh.axis("pp")
    axis.names_ranges = True
    staying = [*(buffer.full for buffer in run.buffers), *model.buffers()]
    directions = iter(DIRECTIONS)
    offload = ActivationOffload(
        model, layers, choose_offloaded(fraction, len(layers)), staying, axis, CPU,
        lambda: ThreadCopyStream(next(directions), cores, link),
    )  # fmt: skip
    for name, layer in layers.items():
        UnitRanges(name, layer)
    return offload


class ThreadCopyStream:
    """A stream on a CPU: a thread copies, in the order in which copies were started. direction: their name in a profiler's trace.
    cores: where the thread runs. link: GB/s at which copies are held back, as over a slower link; None: they are not."""

    def __init__(self, direction: str, cores: Sequence[int], link: float | None = None):
        self._direction, self._link = direction, link
        self._thread = ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, cores))

    def start(self, pairs: Sequence[CopyPair]) -> "ThreadCopies":
        """See `CopyStream`. A CPU has computed what it was given before, so there is nothing to run behind."""
        return ThreadCopies(self._direction, self._thread.submit(self._copy, pairs))

    def _copy(self, pairs: Sequence[CopyPair]) -> None:
        begin = perf_counter()
        with record_function(f"copy {self._direction}"):
            for target, source in pairs:
                target.copy_(source)  # torch gives up Python's lock meanwhile
            if self._link is not None:
                takes_s = sum(source.nbytes for _, source in pairs) / (self._link * 1e9)
                sleep(max(0.0, begin + takes_s - perf_counter()))


class ThreadCopies:
    """Copies that a thread makes."""

    def __init__(self, direction: str, made: "Future[None]"):
        self._direction, self._made = direction, made

    def wait(self) -> None:
        """See `Copies`. A range of the trace where it takes time."""
        if not self._made.done():
            with record_function(f"wait for a copy {self._direction}"):
                self._made.result()
        self._made.result()  # an error of the thread is one here


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points of time as disjoint intervals, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def overlap(some: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """Time that lies in one of `some` and in one of `others`."""
    found, rest = [], merge(others)
    for begin, end in merge(some):
        found += [(max(begin, first), min(end, last)) for first, last in rest if first < end and begin < last]
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Microseconds of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


if __name__ == "__main__":
    main()
