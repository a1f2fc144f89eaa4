"""Seconds for which saves hold training up, beside torch's distributed checkpoints (DCP) of the same tensors in the same run.

    python scripts/bench/checkpoint.py [--parameters 200e6] [--ranks 2] [--rounds 3] [--folder /tmp] [--json FILE]

Ranks on this machine train a Llama with AdamW (fp32, ZeRO stage 3) and save in turns, each time into a new folder, removed later:

    dcp.save         the loop waits for all of it
    dcp.async_save   the loop waits until it returns: by then DCP has copied the tensors; the rest goes on in its thread
    ours             the loop waits in `Saver.start` and in front of an update whose tensors are not staged yet

While a save is under way the ranks train on, so "steps" says what of the speed is left. The first save of each side takes memory
and is told apart. "CPU" is what a save costs a rank's process. Then each is loaded into the same layout; from the disk,
for which the page cache is emptied of both sides' files; for others there is checkpoint_load.py.
Compare sides of one run only: this machine's load changes by the minute.
"""

import argparse
import gc
import json
import os
import resource
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from transformers.models.llama import LlamaConfig

from framework.checkpoint.commit import Retention
from framework.checkpoint.load import load_newest
from framework.checkpoint.save import Saver
from framework.checkpoint.staging import StagingMemory
from framework.comm.collectives import all_reduce
from framework.comm.connect import connect, connect_beside
from framework.data.pack import Microbatch
from framework.plan.plan import make_plan
from framework.recipe.schema import Batch, Launch, Memory, Optim, Precision, Recipe, Zero
from framework.train.build import build
from framework.train.state import saved_entries
from framework.train.step import TrainingRun, train_step

WIDTH, VOCABULARY, CONTEXT = 1024, 1024, 32
CPU = torch.device("cpu")


@dataclass
class Measured:
    """Seconds of one side's saves. blocked: of the loop; durable: until all is on the disk; steps: of those meanwhile; cpu: of
    this rank's process, with all its threads, beyond what as many steps take alone."""

    blocked: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=float, default=200e6)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        arguments = (options.ranks, Path(folder), options)
        torch.multiprocessing.spawn(measure, arguments, nprocs=options.ranks)  # type: ignore[no-untyped-call]


def measure(rank: int, ranks: int, folder: Path, options: argparse.Namespace) -> None:
    """One rank."""
    torch.set_num_threads(1)
    # DCP's own words are about tensors of other ranks, which it is not given.
    run = build_run(int(options.parameters), ranks, rank, folder / "rendezvous")
    bench = Bench(run, folder)
    sides: dict[str, Callable[[int], None]] = {
        "dcp.save": bench.save_by_dcp,
        "dcp.async_save": bench.save_by_dcp_behind,
        "ours": bench.save,
    }
    for _ in range(2):
        bench.take_step()
    shard = sum(entry.data.nbytes for entry in saved_entries(run))
    before = cpu_seconds()
    alone = [bench.take_step() for _ in range(3)]
    bench.step_cpu_s = (cpu_seconds() - before) / len(alone)
    for number in range(options.rounds):
        for save in sides.values():
            save(number)
            gc.collect()
    loads = {"dcp.load": bench.time_alike(bench.load_by_dcp), "ours": bench.time_alike(bench.load)}
    bench.saver.finish()
    run.mesh.close()
    if rank == 0:
        found = {"shard_bytes": shard, "staging_bytes": bench.memory.num_bytes, "step_alone_s": alone, "loads_s": loads,
                 "peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
                 "sides": {name: vars(each) for name, each in bench.measured.items()}}  # fmt: skip
        show(found)
        if options.json is not None:
            options.json.write_text(json.dumps(found, indent=2) + "\n")


class Bench:
    """One rank's training and its saves, each of which ends before the next begins."""

    def __init__(self, run: TrainingRun, folder: Path):
        self.measured: dict[str, Measured] = defaultdict(Measured)
        self.memory = StagingMemory(CPU, num_neighbours=run.mesh.topology.world)
        self.step_cpu_s = 0.0
        self._run, self._folder, self._step = run, folder, 0
        self._world = run.mesh.axis("world")
        beside = connect_beside(run.mesh, "saves")
        self.saver = Saver(folder / "ours", beside, Retention(1), self.memory)
        rows = torch.arange(CONTEXT + 1).view(1, -1) % VOCABULARY
        self._microbatch = Microbatch(rows[:, :-1], rows[:, 1:], None)

    def take_step(self) -> float:
        began = time.perf_counter()
        self._step += 1
        train_step(self._run, [self._microbatch], self._step, 1e-4).read()
        return time.perf_counter() - began

    def save(self, _: int) -> None:
        self._run.optimizer.hold(self.saver.wait_until_staged)
        before = self.saver.stalled_s
        self._watch("ours", self._start, lambda: self.saver.stalled_s - before, self._has_ended)

    def save_by_dcp(self, number: int) -> None:
        path = self._folder / f"dcp-{number}"
        self._watch("dcp.save", lambda: dcp.save(self._tensors(), checkpoint_id=path), None, lambda: True)
        self._remove(self._folder / f"dcp-{number - 1}")

    def save_by_dcp_behind(self, number: int) -> None:
        path, futures = self._folder / f"dcp-behind-{number}", []
        self._watch(
            "dcp.async_save",
            lambda: futures.append(dcp.async_save(self._tensors(), checkpoint_id=path)),
            None,
            lambda: bool(futures) and futures[0].done(),
        )
        futures[0].result()
        self._remove(path)

    def load(self) -> None:
        assert load_newest(self._folder / "ours", saved_entries(self._run), self._world) is not None

    def load_by_dcp(self) -> None:
        [path] = self._folder.glob("dcp-*")
        dcp.load(self._tensors(), checkpoint_id=path)

    def time_alike(self, work: Callable[[], None]) -> float:
        """Seconds of the slowest rank, from the disk."""
        forget(self._folder)
        self._meet()
        began = time.perf_counter()
        work()
        seconds = torch.tensor(time.perf_counter() - began)
        all_reduce(seconds, self._world, "max")
        return float(seconds)

    def _start(self) -> None:
        self.saver.start(self._step, saved_entries(self._run), {"step": self._step})

    def _has_ended(self) -> bool:
        return self.saver._pending is None or self.saver._pending.ended.done()

    def _tensors(self) -> dict[str, Any]:
        # A name for each rank's part: the same bytes to write, and none of DCP's time to divide them.
        return {f"{self._world.rank}/{entry.name}": entry.data for entry in saved_entries(self._run)}

    def _watch(
        self, name: str, start: Callable[[], Any], blocked: Callable[[], float] | None, has_ended: Callable[[], bool]
    ) -> None:
        self._meet()
        os.sync()
        measured = self.measured[name]
        began, cpu_s = time.perf_counter(), cpu_seconds()
        start()
        called = time.perf_counter() - began
        # All ranks take equally many steps.
        is_ended = torch.zeros(())
        steps = []
        while not is_ended:
            steps.append(self.take_step()) if not has_ended() or blocked else None
            is_ended = torch.tensor(float(has_ended()))
            all_reduce(is_ended, self._world, "min")
        measured.durable.append(time.perf_counter() - began if steps else called)
        measured.blocked.append(called if blocked is None else blocked())
        measured.steps += steps
        measured.cpu.append(cpu_seconds() - cpu_s - len(steps) * self.step_cpu_s)
        if self._world.rank == 0:
            print(
                f"{name}: blocked {measured.blocked[-1]:.3f} s, {len(steps)} steps, durable {measured.durable[-1]:.1f} s",
                flush=True,
            )

    def _meet(self) -> None:
        all_reduce(torch.ones(1), self._world)

    def _remove(self, path: Path) -> None:
        self._meet()
        if self._world.rank == 0:
            shutil.rmtree(path, ignore_errors=True)


def build_run(num_parameters: int, ranks: int, rank: int, rendezvous: Path) -> TrainingRun:
    """A rank of a Llama of about so many parameters."""
    recipe, config = describe_llama(num_parameters, ranks)
    plan = make_plan(recipe, config)
    return build(plan, connect(plan.topology, CPU, f"file://{rendezvous}", rank))


def describe_llama(num_parameters: int, ranks: int) -> tuple[Recipe, LlamaConfig]:
    """A recipe (ZeRO stage 3) for a Llama of about so many parameters, and its config."""
    width, of_layer = 3 * WIDTH, 4 * WIDTH**2 + 3 * WIDTH * 3 * WIDTH
    config = LlamaConfig(
        hidden_size=WIDTH,
        intermediate_size=width,
        num_hidden_layers=max(1, (num_parameters - 2 * VOCABULARY * WIDTH) // of_layer),
        num_attention_heads=8,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
    )
    config.use_cache = False
    recipe = Recipe(
        batch=Batch(sequences_per_step=ranks, sequences_per_microbatch=1, context=CONTEXT),
        zero=Zero(stage=3),
        memory=Memory(compile="never"),
        precision=Precision("fp32", "fp32", "fp32"),
        optim=Optim(),
        launch=Launch(ranks=ranks, device="cpu"),
    )
    return recipe, config


def forget(folder: Path) -> None:
    """Have the system read a folder's files from the disk when they are next read."""
    for path in (each for each in folder.rglob("*") if each.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def cpu_seconds() -> float:
    """Seconds of this process so far, in all threads. What the kernel does for it later (writing pages back) is not in it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def show(found: dict[str, Any]) -> None:
    """The table."""
    alone, whole = median(found["step_alone_s"]), found["sides"]["dcp.save"]["blocked"]
    print(
        f"a rank's shard {found['shard_bytes'] / 1e9:.2f} GB, staged in {found['staging_bytes'] / 1e9:.2f} GB, peak resident"
        f" {found['peak_resident_bytes'] / 1e9:.2f} GB; a step alone {alone:.2f} s"
    )
    print(
        f"{'':16} {'blocked: first':>14} {'of dcp.save':>12} {'then':>8} {'of dcp.save':>12} {'durable':>8} {'steps':>8}"
        f" {'CPU':>8}"
    )
    for name, side in found["sides"].items():
        first, *later = side["blocked"]
        then = median(later or [first])
        speed = f"{alone / median(side['steps']):.0%}" if side["steps"] else ""
        print(
            f"{name:16} {first:12.3f} s {first / whole[0]:12.1%} {then:6.3f} s {then / median(whole[1:] or whole):12.1%}"
            f" {median(side['durable']):6.2f} s {speed:>8} {median(side['cpu']):6.2f} s"
        )
    print("loads: " + ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found["loads_s"].items()))


if __name__ == "__main__":
    main()
