"""Ours beside torch DDP, the plain loop and Hugging Face's Trainer, step by step: interleave.py has the method.

    python scripts/bench/data_parallel.py                                  all cases on two ranks and on one
    python scripts/bench/data_parallel.py --ranks 2 --cases 1x128 --rounds 31
    python scripts/bench/data_parallel.py --ranks 1 --sides ours plain trainer --clip-norm none

Every side: fp32, sdpa, fused AdamW, decay on matrices only, gradient norm clipped (or not, `--clip-norm none`).
  ours     framework.train.build and train_step, as a run drives them
  ddp      DistributedDataParallel, gradients as views of its buckets, no_sync on all but the last microbatch
  plain    the same loop without DDP; one rank only
  trainer  Trainer.train() itself, in a thread that is held at the end of each step: from one on_step_end to the next, its
           own loader, accumulation, clipping and callbacks included; no progress bar, logging or saving falls in a step
"""

import argparse
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from interleave import (
    BETAS,
    EPS,
    LR,
    WARMUP_ROUNDS,
    WEIGHT_DECAY,
    Case,
    Loop,
    Ours,
    Setting,
    Side,
    measure,
    parse_clip_norm,
    run_ranks,
    save_weights,
    stock_model,
    table,
    title,
    wrap_ddp,
)
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from framework.comm.connect import Mesh
from framework.data.loader import Microbatch
from framework.recipe.schema import Zero

LOSS_TOLERANCE = 1e-4


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
            return Ours(setting, mesh, Zero(stage=0))
        case "ddp":
            return Loop(setting, wrap_ddp)
        case "plain":
            return Loop(setting, lambda model: model)
        case "trainer":
            return HeldTrainer(setting, tokens)
    raise ValueError(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cases", nargs="+", type=Case.parse, default=[Case(1, 1, 128), Case(1, 2, 512), Case(4, 1, 256)]
    )
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--sides", nargs="+", choices=["ours", "ddp", "plain", "trainer"], default=None)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clip-norm", type=parse_clip_norm, default=1.0)
    options = parser.parse_args()

    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.rounds} rounds, "
          f"clip_norm {options.clip_norm}")  # fmt: skip
    with tempfile.TemporaryDirectory() as weights:
        save_weights(weights)
        for world in options.ranks:
            names = options.sides or (["ours", "ddp", "trainer"] if world > 1 else ["ours", "plain", "trainer"])
            against = "ours" if "ours" in names else names[0]
            print(title(against), flush=True)
            for case in options.cases:
                setting = Setting(case, world, 0, WARMUP_ROUNDS + options.rounds, options.clip_norm, weights, "")
                measured = run_ranks(measure, setting, build_side, names)
                print("\n".join(table(setting, measured, against, LOSS_TOLERANCE)), flush=True)


if __name__ == "__main__":
    main()
