"""The work of thousands of ranks when they start, resume and save, counted without a cluster.

    python scripts/scale.py [--ranks 8 16 32 64 128] [--at 8192] [--zero 3] [--json FILE]

A few worlds of 8 to 128 ranks run the program's own code, each rank as a thread of this process: `train.program`, from the saved
recipe to the loop, then one save; and once more, which resumes. Their file system, store and process groups are real or exact
doubles that count, per rank:

    files      opens, stats, listings, renames, syncs ... below the run's and the data's folders; bytes read and written
    store      sets, gets, adds, waits; bytes of values that a rank receives
    groups     process groups that the rank is in, made as for GPUs, and the peers that it is connected to over gloo
    objects    bytes of the pickled objects that a rank receives in collectives

Counts are whole numbers without noise, so how they grow can be read off: as 1, 1/n (what ranks divide), log2(n) or n for n
ranks. The value at `--at` ranks follows; a count of every rank that grows with n makes the world's total grow with n squared.
Only rank 0 may have counts that grow with n, because it reads and writes what belongs to all. Exit code 1 where another does.
NCCL's own connections, and what Python reads to import, are not counted.
"""

import argparse
import json
import logging
import math
import os
import pickle
import re
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import replace
from functools import cached_property
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist

from framework.checkpoint import save
from framework.comm import algorithms, codec, collectives, connect, groups, objects, p2p
from framework.data.prepare import prepare
from framework.launch import process
from framework.launch.directory import RunDirectory
from framework.monitor.progress import Progress
from framework.recipe.compose import compose, save_recipe
from framework.train import build
from framework.train import program as rank_program
from framework.train import rank as train
from framework.train.loop import Loop
from framework.train.saves import Saves

T = TypeVar("T")
TIMEOUT_S = 120.0
PHASES = ("start", "save", "resume")
WORDS = ("mesh", "axis", "layout", "box", "dual", "unit", "schedule", "state")
NUM_SOURCE_FILES = 40
RECIPE = (
    "track=none",
    "data=files",
    "data.bpe_vocab=300",
    "data.validation=0",
    "model.config={vocab_size: 320, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 4,"
    " num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: true}",
    "precision=fp32",
    "train.validate_every_steps=null",
    "optim.schedule.warmup_steps=2",
    "batch.context=16",
    "batch.sequences_per_microbatch=1",
    "parallel.tp=2",
    "parallel.pp=2",
    "launch.threads_per_rank=1",
    "launch.device=cpu",
)

Term = Callable[[torch.Tensor], torch.Tensor]
ONE: Term = torch.ones_like
SHARE: Term = torch.reciprocal  # a rank's part of what all ranks divide, such as the model's weights
# Forms of growth, simplest first; the last term names it.
GROWTH: dict[str, tuple[Term, ...]] = {
    "1": (ONE,),
    "1/n": (ONE, SHARE),
    "log n": (ONE, torch.log2),
    "n": (ONE, lambda n: n),
    "1/n + log n": (ONE, SHARE, torch.log2),
    "1/n + n": (ONE, SHARE, lambda n: n),
    "1/n + n log n": (ONE, SHARE, lambda n: n * torch.log2(n)),
    "n log n": (ONE, lambda n: n * torch.log2(n)),
    "n^2": (ONE, lambda n: n * n),
}
NO_GROWTH = ("1", "1/n")
EVERY_RANK_MAY = (*NO_GROWTH, "log n", "1/n + log n")
RANK_0_MAY = (*EVERY_RANK_MAY, "n", "1/n + n", "n log n", "1/n + n log n")
# How far a count may be off a form: numbers of more digits are longer texts; which rank comes last, and tells, is chance.
SLACK = {"bytes": 256.0, "store": 1.5, "connections": 0.7}

# Python's audit events of the file system, by the word that the table has for them.
EVENTS = {"open": "open", "os.listdir": "list", "os.scandir": "list", "os.mkdir": "mkdir", "os.rename": "rename",
          "os.remove": "remove", "os.rmdir": "remove"}  # fmt: skip

FINGERPRINT = rank_program.take_fingerprint

HERE = threading.local()  # .rank, .phase, .environment of the thread's rank


class Counts:
    """Counts of one world: by phase, rank and what was counted."""

    def __init__(self) -> None:
        self.by_rank: dict[str, dict[int, Counter[str]]] = {phase: {} for phase in PHASES}
        self._lock = threading.Lock()

    def add(self, what: str, number: int = 1) -> None:
        """For the rank of this thread; nothing where the thread is no rank's."""
        phase, rank = getattr(HERE, "phase", None), getattr(HERE, "rank", None)
        if phase is not None and rank is not None:
            with self._lock:
                self.by_rank[phase].setdefault(rank, Counter())[what] += number


class FileSystem:
    """The real file system; operations below `root` are counted, and the bytes that each thread reads and writes."""

    def __init__(self) -> None:
        self.root: str | None = None
        self.counts = Counts()
        sys.addaudithook(self._hear)

    @contextmanager
    def counting(self, root: Path, counts: Counts) -> Iterator[None]:
        self.root, self.counts = str(root), counts
        stat, sync = os.stat, os.fsync

        def counted_stat(path: Any, *args: Any, **kwargs: Any) -> os.stat_result:
            self._count("stat", path)
            return stat(path, *args, **kwargs)

        def counted_sync(descriptor: int) -> None:
            counts.add("file sync")
            sync(descriptor)

        with patch("os.stat", counted_stat), patch("os.fsync", counted_sync):
            yield
        self.root = None

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if self.root is not None and event in EVENTS and args:
            self._count(EVENTS[event], args[0])

    def _count(self, operation: str, path: Any) -> None:
        if self.root is not None and isinstance(path, str | Path) and str(path).startswith(self.root):
            self.counts.add(f"file {operation}")


def bytes_of_thread() -> tuple[int, int]:
    """Bytes that this thread has asked the kernel to read and to write so far."""
    fields = dict(re.findall(r"(\w+): (\d+)", Path("/proc/thread-self/io").read_text()))
    return int(fields["rchar"]), int(fields["wchar"])


class CountingStore(dist.Store):
    """A store in this process's memory, shared by all ranks."""

    def __init__(self, inner: dist.Store, counts: Counts) -> None:
        super().__init__()
        self._inner, self._counts = inner, counts

    def set(self, key: str, value: Any) -> None:
        self._counts.add("store set")
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        self._counts.add("store get")
        value = self._inner.get(key)
        self._counts.add("store bytes", len(value))
        return value

    def add(self, key: str, number: int) -> int:
        self._counts.add("store add")
        return self._inner.add(key, number)

    def wait(self, keys: list[str], *timeout: Any) -> None:
        self._counts.add("store wait")
        self._inner.wait(keys, *timeout)

    def check(self, keys: list[str]) -> bool:
        self._counts.add("store check")
        return self._inner.check(keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._counts.add("store set")
        return self._inner.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        self._counts.add("store set")
        return self._inner.delete_key(key)


def one_at_a_time(work: Callable[..., T]) -> Callable[..., T]:
    """The function, which no two threads run at once."""
    lock = threading.Lock()

    def run(*args: Any) -> T:
        with lock:
            return work(*args)

    return run


class Group:
    """A process group of threads: what each member brings is there for all. Members call in the same order.

    carries_words: gloo is part of it.
    """

    def __init__(self, ranks: tuple[int, ...], carries_words: bool, distributed: "Distributed") -> None:
        self.ranks, self._distributed = ranks, distributed
        self._device_types = [torch.device("cpu")] if carries_words else []
        self._condition = threading.Condition()
        self._brought: dict[int, dict[int, Any]] = {}
        self._number: Counter[int] = Counter()

    def send(self, xs: list[torch.Tensor], to: int, tag: int) -> Any:
        return self._distributed.isend(xs[0], self, to, tag)

    def recv(self, xs: list[torch.Tensor], source: int, tag: int) -> Any:
        return self._distributed.irecv(xs[0], self, source, tag)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        with self._condition:
            number = self._number[rank]
            self._number[rank] += 1
            self._brought.setdefault(number, {})[rank] = value
            self._condition.notify_all()
            found = self._condition.wait_for(lambda: len(self._brought[number]) == len(self.ranks), TIMEOUT_S)
            if not found:
                raise TimeoutError(f"rank {rank}: {sorted(self._brought[number])} of {self.ranks} have come")
            return [self._brought[number][member] for member in self.ranks]


class Distributed:
    """The part of torch.distributed that the program calls, among threads. Any other name is torch's own.

    is_lazy: gloo connects two ranks when they first talk, as on GPUs; else each member of a group with every other.
    """

    def __init__(self, world: int, counts: Counts, is_lazy: bool) -> None:
        self._world, self._counts, self._is_lazy = world, counts, is_lazy
        self._store = CountingStore(dist.HashStore(), counts)
        self._groups: dict[tuple[tuple[int, ...], int], Group] = {}
        self._made: Counter[tuple[int, tuple[int, ...]]] = Counter()
        self._pairs: set[tuple[int, int]] = set()
        self._mail: dict[tuple[int, int, int], list[torch.Tensor]] = {}
        self._condition = threading.Condition()
        self.group = SimpleNamespace(WORLD=None)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def rendezvous(self, url: str, rank: int, world_size: int, **_: Any) -> Iterator[Any]:
        yield self._store, rank, world_size

    def make(self, ranks: Sequence[int] | None, backend: str | None) -> Group:
        """The group of `ranks`, all for None: one object for its members, a new one each time that they make it again."""
        members = tuple(range(self._world)) if ranks is None else tuple(ranks)
        carries_words = backend is None or "gloo" in backend
        with self._condition:
            self._made[HERE.rank, members] += 1
            group = self._groups.setdefault(
                (members, self._made[HERE.rank, members]), Group(members, carries_words, self)
            )
        self._counts.add("groups")
        if carries_words and not self._is_lazy:
            self._counts.add("gloo connections", len(members) - 1)
        return group

    def init_process_group(self, backend: str | None = None, **_: Any) -> None:
        self.group.WORLD = self.make(None, backend)

    def new_group(self, ranks: Sequence[int] | None = None, backend: str | None = None, **_: Any) -> Group:
        return self.make(ranks, backend)

    def make_in_store(self, ranks: tuple[int, ...], _rank: int, backend: str, *_: Any) -> Group:
        return self.make(ranks, backend)

    def destroy_process_group(self, group: Any = None) -> None:
        pass

    def barrier(self, group: Any = None, **_: Any) -> None:
        members, place = self._members(group)
        distances = [1 << power for power in range((len(members) - 1).bit_length())]
        self._talk([members[(place + sign * far) % len(members)] for far in distances for sign in (1, -1)])
        self._exchange(group, None)

    def all_reduce(self, x: torch.Tensor, op: Any = None, group: Any = None, **_: Any) -> Any:
        members, place = self._members(group)
        self._talk([members[(place + far) % len(members)] for far in (1, -1)])
        brought = torch.stack(self._exchange(group, x.clone()))
        reduce = {dist.ReduceOp.SUM: brought.sum, dist.ReduceOp.MAX: brought.amax, dist.ReduceOp.MIN: brought.amin}
        x.copy_(reduce[op](0) if op is not None else brought.sum(0))
        return SimpleNamespace(wait=lambda: None)

    def broadcast(self, x: torch.Tensor, group: Any = None, group_src: int = 0, **_: Any) -> Any:
        self._talk_as_tree(group, group_src)
        x.copy_(self._exchange(group, x.clone())[group_src])
        return SimpleNamespace(wait=lambda: None)

    def gather(self, x: torch.Tensor, out: list[torch.Tensor] | None, group: Any = None, group_dst: int = 0) -> None:
        self._talk_with(group, group_dst)
        for place, brought in zip(out or (), self._exchange(group, x.clone()), strict=False):
            place.copy_(brought)

    def scatter(self, out: torch.Tensor, xs: list[torch.Tensor] | None, group: Any = None, group_src: int = 0) -> None:
        self._talk_with(group, group_src)
        out.copy_(self._exchange(group, xs)[group_src][self._members(group)[1]])

    def isend(self, x: torch.Tensor, group: Any = None, group_dst: int = 0, tag: int = 0) -> Any:
        to = self._members(group)[0][group_dst]
        self._talk([to])
        with self._condition:
            self._mail.setdefault((HERE.rank, to, tag), []).append(x.clone())
            self._condition.notify_all()
        return SimpleNamespace(wait=lambda *_: None)

    def irecv(self, x: torch.Tensor, group: Any = None, group_src: int = 0, tag: int = 0) -> Any:
        key = (self._members(group)[0][group_src], HERE.rank, tag)
        self._talk([key[0]])

        def wait(*_: Any) -> None:
            with self._condition:
                if not self._condition.wait_for(lambda: self._mail.get(key), TIMEOUT_S):
                    raise TimeoutError(f"no message {key}")
                x.copy_(self._mail[key].pop(0))
            self._counts.add("object bytes", x.nbytes)

        return SimpleNamespace(wait=wait)

    def send(self, x: torch.Tensor, **where: Any) -> None:
        self.isend(x, **where)

    def recv(self, x: torch.Tensor, **where: Any) -> None:
        self.irecv(x, **where).wait()

    def all_gather_object(self, out: list[Any], value: Any, group: Any = None) -> None:
        out[:] = self._receive(group, value, range(self._world))

    def broadcast_object_list(self, values: list[Any], group: Any = None, group_src: int = 0, **_: Any) -> None:
        self._talk_as_tree(group, group_src)
        values[:] = self._receive(group, values[0], (group_src,))

    def _receive(self, group: Any, value: Any, sources: Sequence[int]) -> list[Any]:
        """The objects of the members at the indices `sources`; those of others count as received."""
        members, _ = self._members(group)
        pickled = self._exchange(group, pickle.dumps(value))
        some = [index for index in sources if index < len(members)]
        self._counts.add("object bytes", sum(len(pickled[index]) for index in some if members[index] != HERE.rank))
        return [pickle.loads(pickled[index]) for index in some]

    def _exchange(self, group: Any, value: Any) -> list[Any]:
        return (group or self.group.WORLD).exchange(HERE.rank, value)

    def _members(self, group: Any) -> tuple[tuple[int, ...], int]:
        members = (group or self.group.WORLD).ranks
        return members, members.index(HERE.rank)

    def _talk_with(self, group: Any, root: int) -> None:
        members, place = self._members(group)
        self._talk(members if place == root else [members[root]])

    def _talk_as_tree(self, group: Any, root: int) -> None:
        """gloo's broadcast: in round k the 2^k ranks that have the value send it to those 2^k further on."""
        members, place = self._members(group)
        virtual, size = (place - root) % len(members), len(members)
        parent = [virtual - (1 << (virtual.bit_length() - 1))] if virtual else []
        children = [
            virtual + (1 << k) for k in range(virtual.bit_length(), size.bit_length()) if virtual + (1 << k) < size
        ]
        self._talk([members[(each + root) % size] for each in (*parent, *children)])

    def _talk(self, ranks: Sequence[int]) -> None:
        """Connect to these ranks where that is not done yet."""
        if self._is_lazy:
            with self._condition:
                new = {(HERE.rank, other) for other in ranks if other != HERE.rank} - self._pairs
                self._pairs |= new
            self._counts.add("gloo connections", len(new))


class SaveOnly(Loop):
    """A loop that does not train: it saves once, unless it has resumed."""

    is_done = True  # type: ignore[assignment]

    def steps(self) -> Iterator[int]:
        account(HERE.counts)
        if HERE.phase == "start":
            HERE.phase = "save"
            self.state.step = 1
            yield 1
            account(HERE.counts)
        HERE.phase = None

    def is_validated(self, step: int) -> bool:
        return False


class AtOnce:
    """In place of a rank's thread for saves: what is handed to it is done in the rank's own thread."""

    def __init__(self, *_: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], *args: Any) -> "Future[Any]":
        ended: Future[Any] = Future()
        ended.set_result(work(*args))
        return ended

    def shutdown(self) -> None:
        pass


def account(counts: Counts) -> None:
    """Add the bytes that this thread has read and written since it was last asked."""
    read, written = bytes_of_thread()
    counts.add("bytes read", read - HERE.bytes[0])
    counts.add("bytes written", written - HERE.bytes[1])
    HERE.bytes = bytes_of_thread()


def take_fingerprint_apart(recipe: Any) -> dict[str, str]:
    """The rank's fingerprint; the bytes of code that it hashes are counted by themselves, for imports have read them before."""
    account(HERE.counts)
    taken = FINGERPRINT(recipe)
    HERE.counts.add("code bytes read", bytes_of_thread()[0] - HERE.bytes[0])
    HERE.bytes = bytes_of_thread()
    return taken


def run_rank(rank: int, world: int, phase: str, run_dir: Path, counts: Counts, failures: list[BaseException]) -> None:
    """One rank, as `train.program` runs it."""
    HERE.rank, HERE.phase, HERE.counts, HERE.bytes = rank, phase, counts, bytes_of_thread()
    HERE.environment = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank % 8),
                        "LOCAL_WORLD_SIZE": str(min(8, world)), "GROUP_WORLD_SIZE": str(max(1, world // 8))}  # fmt: skip
    try:
        rank_program.train_as_launched(run_dir, None)
    except BaseException as error:
        failures.append(error)


class Unwatched(SimpleNamespace):
    """A watchdog that watches nothing."""

    def __init__(self, progress: Progress) -> None:
        requests = SimpleNamespace(requested=False)
        super().__init__(progress=progress, requests=requests, stop_talking=list, begin_save=list)

    def hear(self, requests: object) -> AbstractContextManager[None]:
        return nullcontext()

    def end_save(self, is_committed: bool) -> None:
        pass


class Environment(dict[str, str]):
    """os.environ of the thread's rank, on top of the process's."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(HERE, "environment", {}).get(name, os.environ.get(name, default))

    def __getitem__(self, name: str) -> str:
        value = self.get(name)
        if value is None:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: str) -> None:
        getattr(HERE, "environment", {})[name] = value

    def __delitem__(self, name: str) -> None:
        del getattr(HERE, "environment", {})[name]

    def __contains__(self, name: object) -> bool:
        return self.get(str(name)) is not None


def count_world(world: int, zero: int, folder: Path, files: FileSystem) -> Counts:
    """Start, save and resume of a world, in a run of its own below `folder`."""
    counts = Counts()
    words = [*RECIPE, f"data.sources.files.path={folder / 'corpus'}", f"data.root={folder / 'tokens'}",
             f"run.root={folder / 'runs'}", f"zero.stage={zero}", f"launch.ranks={world}",
             f"batch.sequences_per_step={world}"]  # fmt: skip
    recipe = compose(words, [Path(__file__).parents[1] / "recipes"]).require()
    prepare(recipe, progress=False)
    run = RunDirectory.create(folder / "runs", None, f"world{world}")
    save_recipe(replace(recipe, run=replace(recipe.run, id=run.id)), run.recipe)
    backends = connect.choose_backends("cuda", is_debug=False)
    for phase in ("start", "resume"):
        distributed = Distributed(world, counts, backends.is_lazy)
        failures: list[BaseException] = []
        with ExitStack() as stack:
            for room in (algorithms, codec, collectives, connect, groups, objects, p2p):
                if hasattr(room, "dist"):
                    stack.enter_context(patch.object(room, "dist", distributed))
            for room in (connect, process):
                proxy = SimpleNamespace(**{name: getattr(os, name) for name in dir(os) if not name.startswith("_")})
                proxy.environ = Environment()
                stack.enter_context(patch.object(room, "os", proxy))
            stack.enter_context(patch.object(connect, "set_group_timeout", lambda *_: None))
            stack.enter_context(patch.object(connect, "make_group_in_store", distributed.make_in_store))
            stack.enter_context(patch.object(connect, "restart_group_names", lambda: None))
            stack.enter_context(
                patch.object(connect, "choose_backends", lambda _device, is_debug, _backend=None: backends)
            )
            stack.enter_context(
                patch.object(train, "StopRequest", lambda: nullcontext(SimpleNamespace(requested=False)))
            )
            # It asks the store three small questions a second, however many ranks there are (tests/unit/test_watch.py).
            stack.enter_context(patch.object(train, "Watchdog", lambda progress, *_: nullcontext(Unwatched(progress))))
            # Python 3.11 has one lock for a property of all objects: a rank that meets the others in it would wait for ever.
            for found in vars(Saves).values():
                if isinstance(found, cached_property) and hasattr(found, "lock"):
                    stack.enter_context(patch.object(found, "lock", nullcontext()))
            stack.enter_context(patch.object(save, "ThreadPoolExecutor", AtOnce))
            stack.enter_context(patch.object(train, "Loop", SaveOnly))
            # A hook of torch's that is the process's: threads would find one another's.
            stack.enter_context(patch.object(build, "build_buffers", one_at_a_time(build.build_buffers)))
            stack.enter_context(patch.object(rank_program, "take_fingerprint", take_fingerprint_apart))
            stack.enter_context(redirect_stdout(StringIO()))
            stack.enter_context(files.counting(folder, counts))
            threads = [
                threading.Thread(target=run_rank, args=(rank, world, phase, run.path, counts, failures), daemon=True)
                for rank in range(world)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT_S * 10)
        if failures:
            raise failures[0]
    return counts


def fit(worlds: Sequence[int], values: Sequence[float], at: int, slack: float) -> tuple[str, float]:
    """The growth of a count with the number n of ranks, and its value at `at` ranks: by the first of the forms that misses no
    value by more than `slack` and 2% of how far the values differ."""
    x = torch.tensor([float(world) for world in worlds], dtype=torch.float64)
    y = torch.tensor([float(value) for value in values], dtype=torch.float64)
    allowed = slack + 0.02 * float(y.max() - y.min())
    for name, terms in GROWTH.items():
        basis = torch.stack([term(x) for term in terms], dim=1)
        solution = torch.linalg.lstsq(basis, y.unsqueeze(1), driver="gelsd").solution.squeeze(1)
        rises = name in NO_GROWTH or solution[-1] > 0
        if rises and float((basis @ solution - y).abs().max()) <= allowed:
            where = torch.tensor([float(at)], dtype=torch.float64)
            return name, float(torch.stack([term(where) for term in terms], dim=1)[0] @ solution)
    return "?", math.nan


def tabulate(worlds: Sequence[int], counted: dict[int, Counts], at: int) -> tuple[list[str], list[str]]:
    """The table in Markdown, and the rows of other ranks than 0 whose counts grow faster than log n."""
    rows, faults = [], []
    heads = ["phase", "count", f"rank 0: {', '.join(map(str, worlds))} ranks", "grows", f"at {at:,}",
             "each other rank", "grows", f"at {at:,}", f"the world at {at:,}"]  # fmt: skip
    rows.append("| " + " | ".join(heads) + " |")
    rows.append("|---|---|---|---|---|---|---|---|---|")
    for phase in PHASES:
        names = sorted(
            {name for counts in counted.values() for each in counts.by_rank[phase].values() for name in each}
        )
        for name in names:
            first = [counted[world].by_rank[phase][0][name] for world in worlds]
            others = [
                sum(counted[world].by_rank[phase][rank][name] for rank in range(1, world)) / (world - 1)
                for world in worlds
            ]
            slack = next((allowed for word, allowed in SLACK.items() if word in name), 0.05)
            growth_first, at_first = fit(worlds, first, at, slack)
            growth, at_other = fit(worlds, others, at, slack)
            total = at_first + (at - 1) * at_other
            cells = [phase, name, ", ".join(f"{value:,}" for value in first), growth_first, f"{at_first:,.0f}",
                     ", ".join(f"{value:,.1f}" for value in others), growth, f"{at_other:,.1f}", f"{total:,.0f}"]  # fmt: skip
            rows.append("| " + " | ".join(cells) + " |")
            if growth not in EVERY_RANK_MAY:
                faults.append(f"{phase}: {name} of each rank grows with {growth}")
            if growth_first not in RANK_0_MAY:
                faults.append(f"{phase}: {name} of rank 0 grows with {growth_first}")
    return rows, faults


def write_corpus(folder: Path) -> None:
    folder.mkdir()
    for number in range(NUM_SOURCE_FILES):
        text = " ".join(WORDS[(number * index * index + index) % len(WORDS)] for index in range(1, 400))
        (folder / f"{number}.txt").write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128], help="worlds to run; multiples of 8"
    )
    parser.add_argument("--at", type=int, default=8192, help="ranks of the world that is asked about")
    parser.add_argument("--zero", type=int, default=3, help="zero.stage")
    parser.add_argument("--json", type=Path, help="write all counts there as well")
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    files = FileSystem()
    folder = Path(tempfile.mkdtemp(prefix="meshwright-scale-"))
    try:
        write_corpus(folder / "corpus")
        count_world(4, arguments.zero, folder, files)  # imports, caches
        counted = {world: count_world(world, arguments.zero, folder, files) for world in arguments.ranks}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    rows, faults = tabulate(arguments.ranks, counted, arguments.at)
    print("\n".join(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps({world: counts.by_rank for world, counts in counted.items()}, indent=1))
    for fault in faults:
        print(f"TOO MUCH: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
