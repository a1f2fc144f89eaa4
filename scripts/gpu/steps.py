"""Training steps on GPUs: MFU, time of the host, peak memory beside `plan`, kernels by kind. Some 200 s.

    python scripts/gpu/steps.py [--seconds 150] [--only REGEX]          --tiny: on a CPU, which shows only that it runs
    torchrun --nproc-per-node 8 scripts/gpu/steps.py                    layouts of the whole 8B model, rank 0's numbers

alone     some layers of Llama 3.1 8B at 1 x 8,192 tokens on one rank
0 of 8    rank 0 of 8 at ZeRO-3, all 32 layers: the other ranks are not there and messages are copies on streams of their own, so
          memory, streams, storage.resize_ and the caching allocator are those of a node, and losses mean nothing
"""

import argparse
import gc
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from rows import Rows
from torch import Tensor
from transformers.models.llama import LlamaConfig

from framework.comm import algorithms, collectives, connect
from framework.comm.communicator import DeviceProgress
from framework.comm.connect import Mesh, launched_place
from framework.comm.groups import choose_backends
from framework.data.pack import Microbatch
from framework.plan.plan import Plan, make_plan, make_topology
from framework.recipe.schema import Batch, Data, Launch, Memory, Model, Optim, Parallel, Precision, Recipe, Train, Zero
from framework.train.build import build
from framework.train.step import train_step

# Dense bf16 of an H100 SXM, which an H200 has too; of another GPU the MFU is to be scaled.
PEAK_FLOPS = 989.4e12
DOCUMENT_TOKENS = 600
KINDS = {
    "matmul": r"gemm|cutlass|nvjet|xmma|cublas",
    "attention": r"flash|fmha|sdpa|attention|cudnn",
    "optimizer": r"adam",
    "copies": r"memcpy|memset",
    "norms": r"norm",
    "compiled": r"triton",
}
Z3 = Zero(stage=3)
WORLD = launched_place()[1]


@dataclass(frozen=True)
class Case:
    """One row of the table's measurements. layers: of the model; ranks: of the world, of which this is rank 0."""

    name: str
    memory: Memory = field(default_factory=lambda: Memory("selective", compile="never"))
    layers: int = 4
    ranks: int = 1
    zero: Zero = field(default_factory=lambda: Zero(stage=0))
    model: Model = field(default_factory=Model)
    precision: Precision = field(default_factory=lambda: Precision("bf16", "fp32", "fp32"))
    pack: str = "concat"
    accumulation: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    is_profiled: bool = False
    is_tiny: bool = True
    """Whether its CPU form runs too: without a GPU some need a compiler."""


CASES = (
    Case("alone, none", Memory("none", compile="never"), is_profiled=True),
    Case("alone, selective"),
    Case("0 of 8, zero 3, selective", layers=32, ranks=8, zero=Z3, is_profiled=True),
    Case("alone, documents", pack="documents", is_profiled=True),
    Case("alone, compiled", Memory("none", compile="always"), is_profiled=True, is_tiny=False),
    Case("alone, documents, compiled", Memory("none", compile="always"), pack="documents", is_tiny=False),
    Case("alone, fp8, compiled", Memory("none", compile="always"), precision=Precision("fp8"), is_tiny=False),
    Case("alone, logits of all tokens", Memory("none", compile="never", chunked_loss=False)),
    Case("alone, 4 microbatches, zero 3", zero=Z3, accumulation=4),
    Case("alone, int8 moments", precision=Precision("bf16", "fp32", "fp32", "int8")),
    Case("0 of 8, zero 3, full", Memory("full", compile="never"), layers=32, ranks=8, zero=Z3),
)

# Of the ranks that torchrun has started.
LAUNCHED = tuple(
    replace(case, layers=32, ranks=WORLD)
    for case in (
        Case("zero 3, selective", zero=Z3, is_profiled=True),
        Case("zero 3, none", Memory("none", compile="never"), zero=Z3),
        Case("zero 3, none, compiled", Memory("none", compile="always"), zero=Z3, is_tiny=False),
        Case("zero 3 within a node", zero=Zero(stage=3, shard_within="node")),
        Case("tp 2, zero 3", zero=Z3, parallel=Parallel(tp=2)),
        Case("cp 2, zero 3", zero=Z3, parallel=Parallel(cp=2)),
        Case("pp 2, zero 1, 8 microbatches", zero=Zero(stage=1), parallel=Parallel(pp=2), accumulation=8),
    )
)


class Copied:
    """A message under way: copies on a stream of its group's, as NCCL's kernels are."""

    def __init__(self, group: "Alone", work: Callable[[], Any]):
        self._done: torch.cuda.Event | None = None
        if group.stream is None:
            work()
            return
        group.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(group.stream):
            work()
            self._done = group.stream.record_event()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Have the current stream wait."""
        if self._done is not None:
            torch.cuda.current_stream().wait_event(self._done)
        return True


class Alone:
    """A communicator of so many ranks of which only the first is there."""

    _device_types = ()

    def __init__(self, size: int):
        self.size, self.stream = size, torch.cuda.Stream() if torch.cuda.is_available() else None

    def gather(self, out: Tensor, x: Tensor) -> None:
        """Every rank's part is this one's. out: [size * n]; x: [n]."""
        for part in out.view(self.size, -1):
            if part.data_ptr() != x.data_ptr():
                part.copy_(x.view(-1))

    def scatter(self, out: Tensor, x: Tensor) -> None:
        """out: [n]; x: [size * n]."""
        out.view(-1).copy_(x.view(self.size, -1)[0])


@contextmanager
def joined_alone(recipe: Recipe, config: LlamaConfig, device: torch.device) -> Iterator[Mesh]:
    """Rank 0's mesh of a world whose other ranks are not there."""
    names = {name: getattr(dist, name) for name in ("ReduceOp",)}
    fake = SimpleNamespace(
        **names, all_reduce=lambda x, op=None, group=None, async_op=False: Copied(group, lambda: None)
    )
    topology = make_topology(recipe, config)
    cuda = {("cpu", name): algorithms.ALGORITHMS["cuda", name] for name in ("all_gather", "reduce_scatter")}
    with ExitStack() as stack:
        for owner, name, value in (
            (algorithms, "dist", fake),
            (collectives, "dist", fake),
            (
                algorithms,
                "_all_gather_single",
                lambda out, x, group, async_op: Copied(group, lambda: group.gather(out, x)),
            ),
            (
                algorithms,
                "_reduce_scatter_single",
                lambda out, x, group, async_op: Copied(group, lambda: group.scatter(out, x)),
            ),
        ):
            stack.enter_context(patch.object(owner, name, value))
        stack.enter_context(patch.dict(algorithms.ALGORITHMS, cuda))
        with (
            patch.object(connect, "persist", lambda build, *_: Alone(len(build.args[0].ranks))),
            patch.object(connect, "dist", SimpleNamespace(PrefixStore=lambda *_: None)),
            patch.object(connect, "set_group_timeout", lambda *_: None),
            patch.object(connect, "DeviceProgress", DeviceProgress if device.type == "cuda" else lambda: None),
        ):
            backends = choose_backends("cuda", is_debug=False)
            axes = connect.join_axes(topology, 0, backends, None, timedelta(seconds=1))  # type: ignore[arg-type]
        yield Mesh(topology, 0, device, axes)


class Measurement:
    """The cases that are asked for, while there is time."""

    def __init__(self, options: argparse.Namespace):
        self._options, self._rows, self._began = options, Rows(options.part), time.perf_counter()
        self._device = connect.choose_device("cpu" if options.tiny else "cuda")
        self._context = 32 if options.tiny else 8192

    def run(self) -> None:
        """Measure each case."""
        for case in LAUNCHED if WORLD > 1 else CASES:
            if not re.search(self._options.only, case.name) or (self._options.tiny and not case.is_tiny):
                continue
            if time.perf_counter() - self._began > self._options.seconds:
                self._rows.add(case.name, "not run", note="no time left")
                continue
            try:
                self._measure(case)
            except Exception as error:  # of any kind: the next case is worth as much
                self._rows.add(case.name, None, note=f"{type(error).__name__}: {str(error).strip()[:300]}")
            gc.collect()
            if not self._options.tiny:
                torch.cuda.empty_cache()

    def _measure(self, case: Case) -> None:
        recipe, config = self._recipe(case), self._config(case.layers)
        connecting = (
            joined_alone(recipe, config, self._device)
            if case.ranks > WORLD
            else nullcontext(connect.connect(make_topology(recipe, config), self._device))
        )
        with connecting as mesh:
            if not self._options.tiny:
                torch.cuda.reset_peak_memory_stats()
            plan = make_plan(recipe, config)
            run = build(plan, mesh)
            batch, steps = self._batch(case, config), iter(range(1000))
            try:
                self._time(case, plan, lambda: train_step(run, batch, next(steps), 1e-4))
            finally:
                run.close()
                if WORLD > 1:
                    mesh.close()

    def _time(self, case: Case, plan: Plan, step: Callable[[], Any], count: int = 4) -> None:
        began = time.perf_counter()
        first = step().read().loss
        self._rows.add(f"{case.name}: first step", time.perf_counter() - began, "s", f"loss {first:.4f}")
        for _ in range(2):
            step()
        self._finish()
        began, hosts = time.perf_counter(), []
        for _ in range(count):
            start = time.perf_counter()
            result = step()
            hosts.append(time.perf_counter() - start)
        self._finish()
        seconds = (time.perf_counter() - began) / count
        replicas = case.ranks // (case.parallel.tp * case.parallel.pp * case.parallel.cp)
        tokens = case.accumulation * self._context * replicas / case.ranks / seconds
        values = result.read()
        self._rows.add(
            f"{case.name}: step", 1e3 * seconds, "ms", f"loss {values.loss:.4f}, norm {values.gradient_norm:.4f}"
        )
        self._rows.add(f"{case.name}: host", 1e3 * min(hosts), "ms")
        self._rows.add(f"{case.name}: tokens of a rank", tokens, "/s")
        self._rows.add(f"{case.name}: MFU", 100 * tokens * plan.flops_per_token / PEAK_FLOPS, "%")
        self._rows.add(f"{case.name}: planned peak", plan.memory(0).allocated / 2**30, "GiB")
        if self._options.tiny:
            return
        stats, reserved = torch.cuda.memory_stats(), torch.cuda.max_memory_reserved() / 2**30
        retries = f"reserved {reserved:.1f} GiB, {stats.get('num_alloc_retries', 0)} retries"
        self._rows.add(f"{case.name}: peak", torch.cuda.max_memory_allocated() / 2**30, "GiB", retries)
        if case.is_profiled:
            self._profile(case, step)

    def _profile(self, case: Case, step: Callable[[], Any]) -> None:
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            step()
            self._finish()
        taken: dict[str, float] = {}
        slowest: dict[str, tuple[float, str]] = {}
        for each in recorded.key_averages():
            kind = next((kind for kind, form in KINDS.items() if re.search(form, each.key, re.I)), "others")
            taken[kind] = taken.get(kind, 0.0) + each.device_time_total / 1e3
            slowest[kind] = max(slowest.get(kind, (0.0, "")), (each.device_time_total / 1e3, each.key))
        for kind, ms in sorted(taken.items(), key=lambda pair: -pair[1]):
            self._rows.add(f"{case.name}: kernels, {kind}", ms, "ms", "most: {1:.90} {0:.1f}".format(*slowest[kind]))

    def _finish(self) -> None:
        if not self._options.tiny:
            torch.cuda.synchronize()

    def _recipe(self, case: Case) -> Recipe:
        replicas = case.ranks // (case.parallel.tp * case.parallel.pp * case.parallel.cp)
        return Recipe(
            train=Train(steps=10, seed=5),
            batch=Batch(
                sequences_per_step=replicas * case.accumulation, sequences_per_microbatch=1, context=self._context
            ),
            memory=case.memory, parallel=case.parallel, model=case.model, precision=case.precision,
            optim=Optim(lr=1e-4, clip_norm=1.0),
            zero=case.zero, launch=Launch(ranks=case.ranks, device=self._device.type),  # type: ignore[arg-type]
            data=replace(Data(), pack=case.pack),  # type: ignore[arg-type]
        )  # fmt: skip

    def _config(self, layers: int) -> LlamaConfig:
        common = {"use_cache": False, "tie_word_embeddings": False, "pad_token_id": None, "rms_norm_eps": 1e-5}
        if self._options.tiny:
            return LlamaConfig(
                hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                vocab_size=97, max_position_embeddings=64, **common,
            )  # fmt: skip
        return LlamaConfig(
            hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128_256, max_position_embeddings=8192, **common,
        )  # fmt: skip

    def _batch(self, case: Case, config: LlamaConfig) -> list[Microbatch]:
        rng, made = np.random.default_rng(3), []
        for _ in range(case.accumulation):
            ids = torch.from_numpy(rng.integers(0, config.vocab_size, (1, self._context)))
            positions = None
            if case.pack == "documents":
                starts, number = np.zeros(self._context, np.int64), max(1, self._context // DOCUMENT_TOKENS)
                at = np.sort(rng.choice(np.arange(1, self._context), size=number, replace=False))
                starts[at] = at
                positions = torch.from_numpy(np.arange(self._context) - np.maximum.accumulate(starts))[None]
            made.append(Microbatch(ids, ids.roll(-1, 1).contiguous(), positions))
        return made


def main() -> None:
    """All of it, as rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="two narrow layers on a CPU")
    parser.add_argument("--only", default="", help="names of cases, as a regular expression")
    parser.add_argument("--part", default="steps", help="the rows' part")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which no case begins")
    Measurement(parser.parse_args()).run()


if __name__ == "__main__":
    main()
