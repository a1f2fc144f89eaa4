"""The recipe's keys of the optimizer, its schedule and its groups of parameters."""

from dataclasses import dataclass
from typing import Literal

from framework.recipe.machine_schema import group, key


@dataclass(frozen=True)
class LearningRateSchedule:
    name: Literal["constant", "linear", "cosine", "wsd"] = key("shape after the warm-up", "cosine", registry="schedule")
    warmup_steps: int = key("steps of linear warm-up from 0", 0, low=0)
    decay_steps: int | None = key("wsd: steps of the final decay; null: a tenth of the schedule", None, low=1)
    decay_shape: Literal["linear", "cosine", "sqrt", "exponential"] = key(
        "wsd: shape of the final decay; sqrt: 1 - sqrt of its share that is done", "linear"
    )
    final_ratio: float = key("final learning rate over the peak", 0.1, low=0.0, high=1.0)
    start_step: int = key("steps before the schedule begins, with its warm-up", 0, low=0)
    stop_step: int | None = key("step with which the schedule ends; null: train.steps", None, low=1)


@dataclass(frozen=True)
class ParameterGroup:
    pattern: str = key("regular expression searched in parameter names; the first group that matches wins")
    lr_ratio: float = key("learning rate over optim.lr", 1.0, low=0.0)
    weight_decay: float | None = key("null: optim.weight_decay, 0 for norms, biases, A_log, D", None, low=0.0)
    optimizer: Literal["auto", "muon", "adamw"] = key(
        "of optim.name=muon; auto: muon for matrices of layers, adamw for the rest", "auto"
    )


@dataclass(frozen=True)
class Muon:
    steps: int = key("Newton-Schulz iterations of an update", 5, low=1)
    dtype: Literal["bf16", "master"] = key(
        "dtype of the iterations, and of matrices on their way to and from owners", "bf16"
    )
    scale: Literal["adamw", "original"] = key(
        "adamw: 0.2 sqrt(max(rows, columns)), so that adamw's learning rates carry over; original: sqrt(max(1, rows / columns))",
        "adamw",
    )
    heads: bool = key("an attention's projections are matrices of each head, not of all heads together", False)
    ranks_per_matrix: int | Literal["auto"] = key(
        "neighbouring ranks of shard x tp that make a matrix orthogonal together, a slice of its longer side each; auto: as few"
        " of a node as have equal work within a tenth, 1 where matrices are small",
        "auto",
        low=1,
    )


@dataclass(frozen=True)
class Optim:
    name: Literal["adamw", "lion", "sgd", "muon"] = key(
        "the optimizer; muon: of matrices of layers, adamw for the rest", "adamw", registry="optimizer"
    )
    lr: float = key("peak learning rate", 3.0e-4, low=0.0)
    betas: tuple[float, float] = key("moments of adamw and lion", (0.9, 0.95), low=0.0, high=1.0)
    eps: float = key("adamw's epsilon", 1.0e-8, low=0.0)
    momentum: float = key("momentum of sgd and muon", 0.9, low=0.0, high=1.0)
    muon: Muon = group(Muon)
    weight_decay: float = key(
        "decoupled decay; not of norms, biases, A_log, D (sgd: added to the gradient)", 0.1, low=0.0
    )
    decay_follows: Literal["schedule", "peak"] = key(
        "learning rate that decay is multiplied by; schedule: that of the step; peak: optim.lr in every step",
        "schedule",
    )
    qk_clip: float | None = key(
        "largest attention logit: a head that has had a larger one in a step has its projections of queries and keys scaled down"
        " after the update (Kimi K2: 100); null: no clipping",
        None,
        low=0.0,
    )
    clip_update: float | None = key(
        "largest root mean square of a parameter's update over its learning rate, decay apart (AdamW's are mostly below 1); null:"
        " no clipping",
        None,
        low=0.0,
    )
    clip_norm: float | None = key("largest norm of the global gradient; null: no clipping", 1.0, low=0.0)
    groups: dict[str, ParameterGroup] = key("named parameter groups by pattern", {})
    schedule: LearningRateSchedule = group(LearningRateSchedule)
