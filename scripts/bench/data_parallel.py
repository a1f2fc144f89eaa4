"""Ours beside torch DDP, the plain loop and Hugging Face's Trainer: same model, same data, same processes, step by step.

    python scripts/bench/data_parallel.py                                  all cases on two ranks and on one
    python scripts/bench/data_parallel.py --ranks 2 --cases 1x128 --rounds 31
    python scripts/bench/data_parallel.py --ranks 1 --sides ours plain trainer --clip-norm none

Method. All sides live in one set of gloo processes with one thread each, start from the same weights on disk, and take
the same optimizer steps on the same tokens. In each round every side takes one step, in an order that rotates by one per
round, each step between two barriers; so what disturbs the machine disturbs all alike. A round gives one ratio per side,
wall time of the side over wall time of ours; reported is the median over the rounds, with the quartiles. CPU seconds are
of the whole process, averaged over ranks. The loss of each step must agree with ours to 1e-4.

Every side: fp32, sdpa, fused AdamW, decay on matrices only, gradient norm clipped (or not, `--clip-norm none`).
  ours     framework.build and train_step, as a run drives them
  ddp      DistributedDataParallel, gradients as views of its buckets, no_sync on all but the last microbatch
  plain    the same loop without DDP; one rank only
  trainer  Trainer.train() itself, in a thread that is held at the end of each step: from one on_step_end to the next, its
           own loader, accumulation, clipping and callbacks included; no progress bar, logging or saving falls in a step
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import transformers
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from framework.build import build
from framework.data.loader import Microbatch
from framework.mesh.connect import Mesh, connect
from framework.mesh.topology import Topology
from framework.model.load import load_config
from framework.recipe import schema
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
LOSS_TOLERANCE = 1e-4
WARMUP_ROUNDS = 2


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
    """What a rank needs to know to build any side."""

    case: Case
    world: int
    rank: int
    steps: int
    clip_norm: float | None
    weights: str
    scratch: str


class Side(Protocol):
    """One way to train. `step` takes this rank's microbatches and returns its loss; `is_global`: that of all ranks."""

    is_global: bool

    def step(self, microbatches: Sequence[Microbatch]) -> float: ...

    def close(self) -> None: ...


def tokens_of(setting: Setting) -> Tensor:
    """All tokens of the run: [sequences, context + 1], sample j of microbatch m of rank r at (m * world + r) * b + j.

    Drawn by Zipf's law, which a model learns within a few steps: equal losses then say that the updates are equal too.
    """
    sequences = setting.steps * setting.case.accumulation * setting.world * setting.case.sequences
    shares = 1.0 / torch.arange(1, MODEL["vocab_size"] + 1)
    draws = torch.multinomial(
        shares, sequences * (setting.case.context + 1), replacement=True, generator=torch.Generator().manual_seed(0)
    )
    return draws.view(sequences, -1)


def microbatches_of(setting: Setting, tokens: Tensor, step: int) -> list[Microbatch]:
    """This rank's share of a step."""
    case = setting.case
    shares = tokens.view(setting.steps, case.accumulation, setting.world, case.sequences, -1)[step, :, setting.rank]
    return [Microbatch(share[:, :-1].contiguous(), share[:, 1:].contiguous(), None) for share in shares]


def stock_model(setting: Setting) -> LlamaForCausalLM:
    """Hugging Face's model with the weights that every side starts from, ready to train."""
    return LlamaForCausalLM.from_pretrained(setting.weights, dtype=torch.float32).train()


def decay_groups(model: torch.nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    return [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]


class Loop:
    """The loop that everyone writes, around a model that is wrapped or not."""

    is_global = False

    def __init__(self, setting: Setting, wrap: Callable[[torch.nn.Module], torch.nn.Module]):
        self._model = wrap(stock_model(setting))
        self._optimizer = torch.optim.AdamW(decay_groups(self._model), lr=LR, betas=BETAS, eps=EPS, fused=True)
        self._clip_norm = setting.clip_norm

    def step(self, microbatches: Sequence[Microbatch]) -> float:
        model, total = self._model, 0.0
        for index, each in enumerate(microbatches):
            is_last = index == len(microbatches) - 1
            with nullcontext() if is_last or not isinstance(model, DistributedDataParallel) else model.no_sync():
                output = model(each.input_ids, labels=each.labels, shift_labels=each.labels, use_cache=False)
                loss = output.loss / len(microbatches)
                loss.backward()
            total += loss.item()
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), self._clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return total

    def close(self) -> None:
        """Nothing to end."""


class Ours:
    """A run as `meshwright train` builds it, from the same weights, without its observers and its loader."""

    is_global = True

    def __init__(self, setting: Setting, mesh: Mesh):
        case = setting.case
        recipe = schema.Recipe(
            train=schema.Train(steps=setting.steps),
            batch=schema.Batch(
                sequences_per_step=case.sequences * case.accumulation * setting.world,
                sequences_per_microbatch=case.sequences,
                context=case.context,
            ),
            model=schema.Model(family="llama", config=MODEL, weights=setting.weights),
            precision=schema.Precision(compute="fp32"),
            optim=schema.Optim(
                lr=LR,
                betas=BETAS,
                eps=EPS,
                weight_decay=WEIGHT_DECAY,
                clip_norm=setting.clip_norm,
                schedule=schema.LearningRateSchedule(name="constant"),
            ),
            launch=schema.Launch(ranks=setting.world, device="cpu"),
        )
        self._run = build(recipe, load_config(recipe.model), mesh)
        self._step = 0

    def step(self, microbatches: Sequence[Microbatch]) -> float:
        sums = train_step(self._run, microbatches, self._step, LR, votes=())
        self._step += 1
        return sums[0].item()

    def close(self) -> None:
        """Nothing to end."""


class HeldTrainer:
    """Trainer.train() in a thread that goes on for one step whenever `step` asks, and waits at its end."""

    is_global = False

    def __init__(self, setting: Setting, tokens: Tensor):
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._losses: list[float] = []
        self._error: BaseException | None = None
        self._trainer = _build_trainer(setting, tokens, self._losses.append, self._hold)
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()
        self._wait()  # until the first step is about to begin

    def step(self, microbatches: Sequence[Microbatch]) -> float:
        """The microbatches come from Trainer's own loader over the same tokens in the same order."""
        self._go.release()
        self._wait()
        total = sum(self._losses)
        self._losses.clear()
        return total

    def close(self) -> None:
        """Let train() return from the end of its last step."""
        self._go.release()
        self._thread.join()

    def _hold(self) -> None:
        self._done.release()
        self._go.acquire()

    def _wait(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def _train(self) -> None:
        try:
            self._trainer.train()
        except BaseException as error:  # re-raised in the thread that waits
            self._error = error
        self._done.release()


def _build_trainer(setting: Setting, tokens: Tensor, keep_loss: Callable, hold: Callable[[], None]) -> Trainer:
    class Samples(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(tokens)

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            row = tokens[index]
            return {"input_ids": row[:-1], "labels": row[1:], "shift_labels": row[1:]}

    class TakesTurns(Trainer):
        def _get_train_sampler(self, *_: Any, **__: Any) -> torch.utils.data.Sampler:
            return torch.utils.data.SequentialSampler(tokens)

        def training_step(self, *arguments: Any, **options: Any) -> Tensor:
            loss = super().training_step(*arguments, **options)
            keep_loss(loss.item())
            return loss

    class Holds(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            hold()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            hold()

    arguments = TrainingArguments(
        output_dir=f"{setting.scratch}/trainer-{setting.rank}",
        use_cpu=True,
        max_steps=setting.steps,
        per_device_train_batch_size=setting.case.sequences,
        gradient_accumulation_steps=setting.case.accumulation,
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        optim="adamw_torch_fused",
        learning_rate=LR,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=setting.clip_norm or 0.0,
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        ddp_backend="gloo" if setting.world > 1 else None,
        ddp_find_unused_parameters=False,
    )
    trainer = TakesTurns(stock_model(setting), arguments, train_dataset=Samples(), callbacks=[Holds()])
    trainer.remove_callback(PrinterCallback)
    return trainer


def build_side(name: str, setting: Setting, mesh: Mesh, tokens: Tensor) -> Side:
    match name:
        case "ours":
            return Ours(setting, mesh)
        case "ddp":
            return Loop(setting, lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True))
        case "plain":
            return Loop(setting, lambda model: model)
        case "trainer":
            return HeldTrainer(setting, tokens)
    raise ValueError(name)


def measure(setting: Setting, names: list[str], rendezvous: str, results: Path) -> None:
    """One rank: every side takes every step; rank 0 writes wall seconds, CPU seconds and losses per side and round."""
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if setting.world > 1:  # how Trainer finds the process group that `connect` makes
        rank, world = str(setting.rank), str(setting.world)
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    mesh = connect(Topology(dp=setting.world), torch.device("cpu"), rendezvous, setting.rank)
    tokens = tokens_of(setting)
    sides = {name: build_side(name, setting, mesh, tokens) for name in names}
    wall_s: dict[str, list[float]] = {name: [] for name in names}
    cpu_s: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    for step in range(setting.steps):
        microbatches = microbatches_of(setting, tokens, step)
        first = step % len(names)
        for name in names[first:] + names[:first]:
            wall, cpu, loss = _time_step(sides[name], microbatches, setting.world)
            wall_s[name].append(wall)
            cpu_s[name].append(cpu)
            losses[name].append(loss)
    if setting.rank == 0:
        results.write_text(json.dumps({"wall_s": wall_s, "cpu_s": cpu_s, "losses": losses}))
    for side in sides.values():
        side.close()
    mesh.close()


def _time_step(side: Side, microbatches: list[Microbatch], world: int) -> tuple[float, float, float]:
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


def run_case(case: Case, world: int, names: list[str], rounds: int, clip_norm: float | None, weights: str) -> dict:
    """Start the ranks, wait for them, and return what rank 0 measured."""
    with tempfile.TemporaryDirectory() as scratch:
        results, context = Path(scratch) / "results.json", multiprocessing.get_context("spawn")
        steps = WARMUP_ROUNDS + rounds
        settings = [Setting(case, world, rank, steps, clip_norm, weights, scratch) for rank in range(world)]
        ranks = [
            context.Process(target=measure, args=(setting, names, f"file://{scratch}/rendezvous", results))
            for setting in settings
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"{case} on {world} ranks: exit codes {[rank.exitcode for rank in ranks]}")
        return json.loads(results.read_text())


def table(case: Case, world: int, measured: dict, against: str) -> list[str]:
    """Rows of the markdown table; the ratio is a side's wall time over that of `against`, round by round."""
    rows = []
    for name in measured["wall_s"]:
        wall, cpu = measured["wall_s"][name][WARMUP_ROUNDS:], measured["cpu_s"][name][WARMUP_ROUNDS:]
        ratios = [mine / theirs for mine, theirs in zip(wall, measured["wall_s"][against][WARMUP_ROUNDS:], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        losses = measured["losses"][name]
        pairs = zip(losses, measured["losses"][against], strict=True)
        error = max(abs(mine - theirs) / abs(theirs) for mine, theirs in pairs)
        verdict = "" if error <= LOSS_TOLERANCE else " DIFFERS"
        rows.append(
            f"| {case} | {world} | {name} | {statistics.median(wall) * 1e3:.0f} | {statistics.median(cpu) * 1e3:.0f} "
            f"| {middle:.3f} ({low:.3f} to {high:.3f}) | {losses[0]:.3f} to {losses[-1]:.3f}, {error:.0e}{verdict} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", type=Case.parse, default=[Case(1, 1, 128), Case(1, 2, 512), Case(4, 1, 256)]
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--sides", nargs="+", choices=["ours", "ddp", "plain", "trainer"], default=None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clip-norm", type=lambda text: None if text == "none" else float(text), default=1.0)
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}

    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.rounds} rounds, "
          f"clip_norm {options.clip_norm}")  # fmt: skip
    print(
        "| microbatch | ranks | side | wall ms | CPU ms per rank | wall over ours (quartiles) | loss, relative error |"
    )
    print("|---|---|---|---|---|---|---|", flush=True)
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as weights:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(weights)
        for world in options.ranks:
            names = options.sides or (["ours", "ddp", "trainer"] if world > 1 else ["ours", "plain", "trainer"])
            for case in options.cases:
                measured = run_case(case, world, names, options.rounds, options.clip_norm, weights)
                print("\n".join(table(case, world, measured, "ours" if "ours" in names else names[0])), flush=True)


if __name__ == "__main__":
    main()
