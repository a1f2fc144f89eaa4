"""Options of memory and precision go together, and with every axis: any two of them that may meet do so in a short training run.

    with the options    activation checkpointing, states and activations elsewhere: they change no bit
    without them        the same precision, moments, loss and layout: beside stock Hugging Face in one process, to 1e-9 in
                        fp64 and 1e-5 in fp32; in fewer bits within what rounding does to one process

Each option alone is in files of its own.
"""

from tests.torchao_folder import FOLDER  # noqa: F401  # isort: skip  first: what follows may import torchao from there

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import PretrainedConfig

from framework.model import loss
from framework.model.precision import DTYPES
from framework.optim import disk_ring
from framework.plan.plan import GB, make_plan
from framework.recipe.schema import Memory, Offload, Parallel, Pipeline, Precision, Recipe, Zero
from framework.verify.compare import NUM_REFERENCES, TOLERANCES, ErrorRow, compare, exceeds, judge, render
from framework.verify.evidence import Evidence, perturb
from framework.verify.layout import initial_weights
from framework.verify.oracle import run_oracle
from tests.families import family
from tests.laws.test_sabotage import count_tokens_of_the_rank
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import Case, small_recipe, train_layouts
from tests.ranks.pool import RankPool
from tests.ranks.test_offload import keep_the_last_gradient

WORLD = 4
SEQUENCES = 12
# Weights for which no router's choice is so near a tie that rounding in bf16 or fp16 turns it: a token at another expert is no
# rounding of the gradient.
SEED = 7
# Of most microbatches here there are several chunks of tokens, and of most shards several chunks of states.
LEAST_CHUNK, CHUNK_BYTES = 2, 1 << 14
# Four layers make two groups for sqrt, and two stages of two. Widths of which also a tp rank's part is a multiple of 16, for fp8.
MODEL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}

POLICIES = ("none", "selective", "full", "sqrt", "auto")
ACTIVATIONS = (0.0, 0.5, 1.0)
# Of masters and moments, those that are elsewhere and where.
STATES = ((0.0, "host"), (0.5, "host"), (1.0, "host"), (1.0, "disk"))
PARAMETERS = (0.0, 1.0)
CHUNKED = (False, True)
PRECISIONS = {
    "fp64": Precision("fp64", "fp64", "fp64"),
    "fp32": Precision("fp32", "fp32", "fp32"),
    "bf16": Precision("bf16"),
    "bf16 without a master": Precision("bf16", "none"),
    "fp16": Precision("fp16", loss_scale=1024.0),
    **({"fp8": Precision("fp8")} if find_spec("torchao") else {}),
}
MOMENTS = ("fp32", "bf16", "int8")
# Degrees on four ranks, the schedule and the microbatches of a step; what is left of the ranks is dp.
MESHES: Mapping[str, tuple[Parallel, str, int]] = {
    "dp 2, tp 2": (Parallel(tp=2), "1f1b", 2),
    "dp 2, tp 2, whole sequences": (Parallel(tp=2, sequence=False), "1f1b", 1),
    "dp 2, pp 2, zb_h1": (Parallel(pp=2), "zb_h1", 3),
    "dp 4, ep 2": (Parallel(ep=2), "1f1b", 1),
    "tp 2, pp 2, ep 2": (Parallel(tp=2, pp=2, ep=2), "1f1b", 2),
    "dp 2, cp 2": (Parallel(cp=2), "1f1b", 2),
}
ZEROS = (Zero(0), Zero(1), Zero(2, accumulate="local"), Zero(3))


@dataclass(frozen=True)
class Choice:
    """One value of each option, and a layout."""

    policy: str
    activations: float
    states: tuple[float, str]
    parameters: float
    chunked: bool
    precision: str
    moments: str
    mesh: str
    zero: Zero

    def __str__(self) -> str:
        states = f"states {self.states[0]:g} on the {self.states[1]}"
        words = [self.mesh, f"zero {self.zero.stage}", self.precision, f"moments {self.moments}", self.policy, states]
        words += [f"activations {self.activations:g}", f"parameters {self.parameters:g}"]
        return ", ".join([*words, "chunked loss"] if self.chunked else words)

    @property
    def plain(self) -> "Choice":
        """Without the options that change no bit."""
        return replace(self, policy="none", activations=0.0, states=STATES[0], parameters=0.0)

    @property
    def kind(self) -> tuple[str, str, str]:
        """What an oracle depends on: family, precision, moments."""
        return "mixtral" if "ep" in self.mesh else "llama", self.precision, self.moments

    def recipe(self, config: PretrainedConfig, folder: Path) -> Recipe:
        """folder: on a disk."""
        parallel, schedule, accumulation = MESHES[self.mesh]
        word = "fp64" if self.precision == "fp64" else "bf16"
        small = small_recipe(word, WORLD, accumulation, SEQUENCES, 0.05, self.zero, parallel)
        part, home = self.states
        path = str(folder) if home == "disk" else None
        offload = Offload(part, self.parameters, self.activations, home, path)  # type: ignore[arg-type]
        memory = Memory(self.policy, chunked_loss=self.chunked, compile="never", offload=offload)  # type: ignore[arg-type]
        precision = replace(PRECISIONS[self.precision], moments=self.moments)
        small = replace(small, train=replace(small.train, seed=SEED))
        recipe = replace(small, precision=precision, pipeline=Pipeline(schedule), memory=memory)  # type: ignore[arg-type]
        return replace(recipe, memory=replace(memory, budget_gb=find_budget(recipe, config)))


def find_budget(recipe: Recipe, config: PretrainedConfig) -> float | None:
    """For `auto`, half way between what the fullest rank holds if all is kept and if only inputs are: it has to choose."""
    if recipe.memory.activation_checkpointing != "auto":
        return None
    plans = [
        make_plan(replace(recipe, memory=replace(recipe.memory, activation_checkpointing=policy)), config)  # type: ignore[arg-type]
        for policy in ("none", "full")
    ]
    return max(sum(plan.memory(rank).reserved for plan in plans) / len(plans) for rank in range(WORLD)) / GB


def may_meet(
    policy: str,
    activations: float,
    states: tuple[float, str],
    parameters: float,
    chunked: bool,
    precision: str,
    moments: str,
    mesh: str,
    zero: Zero,
) -> bool:
    """Whether a recipe of these is not refused (`recipe/layout_rules.py`)."""
    is_on_disk = states[1] == "disk"
    if activations and (is_on_disk or policy not in ("none", "full")):
        return False
    if is_on_disk and (moments != "fp32" or PRECISIONS[precision].master == "none"):
        return False
    return not parameters or zero.stage == 3


@cache
def cover() -> tuple[Choice, ...]:
    factors = (POLICIES, ACTIVATIONS, STATES, PARAMETERS, CHUNKED, tuple(PRECISIONS), MOMENTS, tuple(MESHES), ZEROS)
    return tuple(Choice(*row) for row in cover_pairs(factors, may_meet))


@contextmanager
def in_small_chunks() -> Iterator[None]:
    with patch.object(loss, "LEAST_CHUNK", LEAST_CHUNK), patch.object(disk_ring, "CHUNK_BYTES", CHUNK_BYTES):
        yield


def case_of(choice: Choice, folder: Path) -> Case:
    """The run with the options of a choice and the run without them."""
    name, *_ = choice.kind
    changes = MODEL | {"tie_word_embeddings": name == "llama"}
    config = Case(str(choice), family(name), {}, changes).config
    layouts = {str(each): each.recipe(config, folder) for each in (choice, choice.plain)}
    return Case(str(choice), family(name), layouts, changes)


Sabotage = Callable[[], AbstractContextManager[Any]]


def find_faults(
    rank: int,
    world: int,
    rendezvous: str,
    choices: Sequence[Choice],
    folder: Path,
    sabotage: Sabotage = nullcontext,
) -> dict[str, list[str]]:
    """Body: by choice what is wrong. Ranks share the kinds of oracles."""
    with in_small_chunks(), sabotage():
        cases = {choice: case_of(choice, folder) for choice in choices}
        found = train_layouts(rank, world, rendezvous, list(cases.values()))
    by_kind = defaultdict(list)
    for choice in choices:
        by_kind[choice.kind].append(choice)
    faults = {}
    for kind in sorted(by_kind)[rank::world]:
        oracles = Oracles(cases[by_kind[kind][0]])
        for choice in by_kind[kind]:
            name, plain = str(choice), found[str(choice), str(choice.plain)]
            faults[name] = [*find_different_bits(found[name, name], plain), *oracles.find_faults(plain)]
    return faults


def find_different_bits(found: Evidence, plain: Evidence) -> Iterator[str]:
    if (found.losses, found.norms) != (plain.losses, plain.norms):
        yield f"losses {found.losses} and norms {found.norms}, without the options {plain.losses} and {plain.norms}"
    for kind in ("gradients", "weights"):
        one, other = getattr(found, kind), getattr(plain, kind)
        differ = [name for name in one.keys() | other.keys() if name not in one or not one[name].equal(other[name])]
        if differ:
            yield f"{kind} with other bits than without the options: {sorted(differ)}"


class Oracles:
    """One process, of a kind of runs. Moments in int8 are rounded by blocks of a layout, so there each layout has its own."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._known: dict[tuple[str, int | None], Evidence] = {}

    def find_faults(self, layout: Evidence) -> Iterator[str]:
        rows, tolerance = self._compare(layout)
        if self._case.recipe.precision.moments != "fp32" and self._word != "fp64":
            # Rounding turns roundings of moments, for few weights and by a whole spacing: after that only fp64 is bounded.
            rows = [row for row in rows if row.quantity == "gradient, step 1"]
        if exceeds(rows, tolerance):
            yield render(rows, tolerance)

    @property
    def _word(self) -> str:
        return self._case.recipe.precision.compute

    def _compare(self, layout: Evidence) -> tuple[list[ErrorRow], float]:
        if self._word in TOLERANCES:
            return compare(layout, self._run(layout)), TOLERANCES[self._word]
        references = [self._run(layout, seed) for seed in range(NUM_REFERENCES)]
        return judge(layout, references, self._run(layout, word="fp32"), self._word), 0.0

    def _run(self, layout: Evidence, seed: int | None = None, word: str = "") -> Evidence:
        """seed: of initial weights that are rounded otherwise. word: another compute dtype."""
        if layout.blocks:
            return self._compute(layout, seed, word)
        key = word, seed
        if key not in self._known:
            self._known[key] = self._compute(layout, seed, word)
        return self._known[key]

    def _compute(self, layout: Evidence, seed: int | None, word: str) -> Evidence:
        case, recipe = self._case, self._case.recipe
        if word:
            recipe = replace(recipe, precision=replace(PRECISIONS[word], moments=recipe.precision.moments))
        dtype = DTYPES[recipe.precision.compute]
        weights = initial_weights(case.config, recipe.train.seed)
        if seed is not None:
            weights = {name: perturb(weight, dtype, seed) for name, weight in weights.items()}
        return run_oracle(recipe, case.config, weights, case.batches(), dtype, layout=layout)


@pytest.mark.grid
@pytest.mark.parametrize("precision", PRECISIONS)
def test_any_two_options_and_axes_go_together(pool: RankPool, precision: str, tmp_path: Path) -> None:
    choices = [choice for choice in cover() if choice.precision == precision]
    faults: dict[str, list[str]] = {}
    for of_rank in pool.run(WORLD, find_faults, choices, tmp_path, timeout_s=600):
        faults |= of_rank
    assert faults.keys() == {str(choice) for choice in choices}
    failed = {name: each for name, each in faults.items() if each}
    assert not failed, "\n\n".join("\n".join([name, *each]) for name, each in failed.items())
    assert not list(tmp_path.iterdir()), "runs that are over leave no file"


SABOTAGED = Choice("full", 0.5, (1.0, "host"), 1.0, True, "fp16", "fp32", "dp 2, tp 2", Zero(3))


@pytest.mark.grid
@pytest.mark.parametrize(
    ("sabotage", "says"),
    [(keep_the_last_gradient, "with other bits than without"), (count_tokens_of_the_rank, "loss")],
    ids=["an option", "the layout"],
)
def test_what_an_option_or_the_layout_does_wrong_shows(
    pool: RankPool, sabotage: Sabotage, says: str, tmp_path: Path
) -> None:
    faults = [
        each for found in pool.run(WORLD, find_faults, [SABOTAGED], tmp_path, sabotage) for each in found.values()
    ]
    assert says in str(faults)
