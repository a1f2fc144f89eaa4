"""Predicted bytes beside counted: random layouts of 1 to 4 ranks on this machine, over gloo.

    python scripts/bench/foresight_memory.py [--layouts 40] [--seed 1] [--estimated] [--json FILE]

Layouts are drawn by `scripts/random_recipes.py`, of small models whose activations have formulas.
Each is built as `meshwright train` builds it and takes two steps, of which the second is counted:

    states        distinct memory of parameters, gradients, masters and moments, before the step
    activations   what operations of the step have allocated and somebody holds when a forward ends, without parameters that
                  are gathered then: the most of all forwards of a rank

Of a mixture the mean of the ranks at one place of the pipeline is compared: a router is not uniform, and what one rank's experts
get more than the mean, others get less. What a rank has received ahead of its next forward is counted and predicted with
activations. States have to be equal, activations within 3%. A forward's own temporaries are gone when it ends, and so is what
backward computes again, so neither is counted. With --estimated: models whose layers have no formulas, to see how far the
estimate is off.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[2]))

from framework.comm.connect import connect
from framework.data.pack import Microbatch, cut_context
from framework.errors import MeshwrightError
from framework.model.load import load_config
from framework.optim.optimizers import state_names
from framework.plan.plan import Plan, make_plan
from framework.plan.state_bytes import KINDS, measure_units, total_on_device
from framework.recipe.compose import compose
from framework.recipe.schema import Batch, Launch, Memory, Model, Precision, Recipe
from framework.train.build import build
from framework.train.step import TrainingRun, train_step
from framework.verify.pool import RankPool
from scripts.random_recipes import Drawn, draw, write

RANKS = (1, 2, 4, 4)
STATES = tuple(kind for kind in KINDS if kind != "gathered")
# Of which layers are known by formulas, and values of their configs: wide enough for tensors of tokens to be more than tables.
WIDTHS = {"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 8, "num_key_value_heads": 4}
WIDTHS |= {"vocab_size": 1024, "head_dim": 16, "max_position_embeddings": 512}
EXPERTS = {"moe_intermediate_size": 96, "num_experts": 8, "mlp_only_layers": []}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen3": {},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 96},
    "qwen3_moe": EXPERTS,
}
# Tokens that a layer's attention reaches back, by family; None: all. Contexts are shorter and longer.
WINDOWS: Mapping[str, Sequence[int | None]] = {"mistral": (None, 48, 96), "qwen3": (None, None, 48)}
# Of which layers are estimated, and what of their configs differs from the above.
ESTIMATED: Mapping[str, Mapping[str, Any]] = {
    "gpt2": {"n_embd": 128, "n_head": 8, "n_layer": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gpt_neox": {},
    "opt": {"ffn_dim": 512, "word_embed_proj_dim": 128, "dropout": 0.0},
    "bloom": {"n_layer": 4, "n_head": 8},
    "phi": {},
    "phi3": {},
    "gemma2": {},
    "cohere": {},
    "starcoder2": {},
    "stablelm": {},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 96},
    "deepseek_v3": {
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "moe_intermediate_size": 96,
        "q_lora_rank": 64,
        "kv_lora_rank": 32,
    }
    | {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 0}
    | dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim"), 16),
}
ESTIMATED_POLICIES = ("none", "full")
# How far activations may be off.
WITHIN = 0.03
# Readings of what is held, of which the least counts, and seconds before each.
READINGS, LET_GO_S = 2, 0.002
# What is not drawn: it changes no byte; or it moves states and activations to the host, which on a CPU is the device; or, of a
# capacity of experts, it drops as many rows as the router is uneven, which no layout tells. Formulas are those of the default
# kernels of experts: what others keep (`eager`: one tensor of rows more) is not in them.
FIXED: dict[str, Any] = {f"memory.offload.{name}": 0.0 for name in ("optimizer", "parameters", "activations")}
FIXED |= {
    "train.steps": 5,
    "model.attention": "auto",
    "config.vocab_size": None,
    "model.freeze": [],
    "optim.clip_norm": 1.0,
    "model.expert_capacity": None,
    "model.experts": "auto",
}


@dataclass(frozen=True)
class Counted:
    """One layout. rank: of its ranks the one whose activations are off most, by predicted over counted."""

    layout: str
    rank: int
    are_states_equal: bool
    predicted: int
    counted: int

    @property
    def ratio(self) -> float:
        return self.predicted / self.counted


Held = tuple[dict[str, int], list[int]]


def draw_recipe(seed: int, number: int) -> Recipe:
    """The first attempt of a draw that the rules allow."""
    names = tuple(FAMILIES)
    for attempt in range(200):
        rng = random.Random(f"memory {seed}/{number}/{attempt}")
        family = names[number % len(names)]
        given = FIXED | {"model.family": family, "launch.ranks": RANKS[number % len(RANKS)], "precision": "fp32"}
        given["batch.context"] = rng.choice((64, 96, 128))
        drawn = draw(seed, number, attempt, given)
        recipe = _recipe_of(drawn, FAMILIES[family] | _draw_window(family, rng))
        if recipe is not None:
            return recipe
    raise SystemExit(f"draw {number} of seed {seed}: no attempt is legal")


def _draw_window(family: str, rng: random.Random) -> dict[str, Any]:
    """Values of the config. Of qwen3's layers the first has no window."""
    if family not in WINDOWS:
        return {}
    window = rng.choice(WINDOWS[family])
    return {
        "sliding_window": window,
        "use_sliding_window": window is not None,
        "max_window_layers": 1,
        "layer_types": None,
    }


def _recipe_of(drawn: Drawn, changes: Mapping[str, Any]) -> Recipe | None:
    """None where it is refused."""
    try:
        recipe = compose([*write(drawn), "launch.device=cpu", "launch.threads_per_rank=1"]).require()
        known = load_config(recipe.model).to_dict()
        widths = {key: value for key, value in {**WIDTHS, **changes}.items() if key in known}
        recipe = replace(recipe, model=replace(recipe.model, config=dict(recipe.model.config) | widths))
        plan = make_plan(recipe, load_config(recipe.model))
        plan.memory(0)
    except MeshwrightError:
        return None
    return recipe


# --- on the ranks


def count(rank: int, world: int, rendezvous: str, recipe: Recipe) -> Held:
    """One rank: (bytes of its states by kind, bytes of activations behind each of its forwards)."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    plan = make_plan(recipe, load_config(recipe.model))
    mesh = connect(plan.topology, torch.device("cpu"), rendezvous, rank)
    run = build(plan, mesh)
    states = count_states(run)
    batches = [_make_batch(plan, rank) for _ in range(2)]
    train_step(run, batches[0], 0, 1e-4).read()
    activations = count_activations(run, batches[1])
    run.close()
    mesh.close()
    return states, activations


def _make_batch(plan: Plan, rank: int) -> list[Microbatch]:
    derived, slices = plan.derived, plan.context_slices(rank)
    shape = derived.sequences_per_microbatch, derived.context + 1
    tokens = [torch.randint(plan.vocabulary_size, shape) for _ in range(derived.accumulation)]
    # Two documents in each sequence where they are kept apart, of lengths that no number of ranks divides.
    positions = None
    if plan.recipe.data.isolates:
        first = derived.context // 2 + 1
        positions = torch.cat([torch.arange(first), torch.arange(derived.context - first)]).repeat(shape[0], 1)
    return [cut_context(Microbatch(each[:, :-1].clone(), each[:, 1:].clone(), positions), slices) for each in tokens]


def count_states(run: TrainingRun) -> dict[str, int]:
    """Bytes of distinct memory; what two kinds share counts for the first of them."""
    states = [
        tensor
        for shard in run.optimizer.shards
        for tensor in run.optimizer.states_of(shard).memory(shard, 0, shard.value.numel())
    ]
    kinds: dict[str, list[Tensor]] = {
        "parameters": [tensor for buffer in run.buffers for tensor in (buffer.full, buffer.shard)],
        "gradients": [tensor for buffer in run.buffers for tensor in (buffer.gradient, buffer.reduced)],
        "master": [buffer.master for buffer in run.buffers],
        "optimizer": states,
    }
    seen: set[int] = set()
    totals = {}
    for kind, tensors in kinds.items():
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
        totals[kind] = sum(num_bytes for place, num_bytes in storages.items() if place not in seen)
        seen |= storages.keys()
    return totals


def count_activations(run: TrainingRun, batch: Sequence[Microbatch]) -> list[int]:
    """Bytes allocated when each forward of a step ends, without full parameters and gradients that have come since."""
    found: list[int] = []
    allocations = Allocations()
    for stage in run.stages.values():
        forward = stage.forward

        def marked(*arguments: Any, forward: Any = forward) -> Any:
            outputs = forward(*arguments)
            found.append(allocations.count(_storages_of_buffers(run)))
            return outputs

        stage.forward = marked  # type: ignore[method-assign]
    with allocations:
        train_step(run, batch, 1, 1e-4).read()
    return found


def _storages_of_buffers(run: TrainingRun) -> set[int]:
    return {each.untyped_storage()._cdata for buffer in run.buffers for each in (buffer.full, buffer.gradient)}


class Allocations(TorchDispatchMode):
    """Memory that operations have allocated since it was entered and that is still held, by whomever.

    Weak references to storages, because no allocator tells: torch's profiler does not see what a thread of gloo's frees.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation; of its outputs those that are no views of its inputs are new."""
        outputs = func(*args, **(kwargs or {}))
        given = {each.untyped_storage()._cdata for each in _tensors((args, kwargs))}
        for each in _tensors(outputs):
            storage = each.untyped_storage()
            if storage._cdata not in given:
                self.storages[storage._cdata] = StorageWeakRef(storage)
        return outputs

    def count(self, without: set[int]) -> int:
        """Bytes of those storages that are held, without some."""
        return min(self._count_now(without) for _ in range(READINGS))

    def _count_now(self, without: set[int]) -> int:
        # A thread of gloo's lets go of its tensors some time after the wait for it has returned.
        time.sleep(LET_GO_S)
        self.storages = {place: each for place, each in self.storages.items() if not each.expired()}
        held = [torch.UntypedStorage._new_with_weak_ptr(each.cdata) for each in self.storages.values()]  # type: ignore[attr-defined]
        return sum(each.nbytes() for each in held if each is not None and each._cdata not in without)


def _tensors(values: Any) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


# --- beside what is foretold


def compare(recipe: Recipe, ranks: Sequence[Held]) -> Counted:
    """ranks: what each counted."""
    plan = make_plan(recipe, load_config(recipe.model))
    firsts, rows = plan.topology.ranks("pp", 0), []
    for rank, (states, own) in enumerate(ranks):
        counted = max(_mean_of_place(plan, rank, ranks) if plan.mixtures else own)
        stage = plan.memory(rank)
        phases = [stage.phases[name] for name in ("forward", "loss")]
        predicted = max(each["activations"] + each["logits"] + each["communication"] for each in phases)
        # What is foretold is of the first rank at a place. Others' moments of few bits may be cut into some blocks more or less.
        names, moments = partial(state_names, plan.recipe.optim), plan.recipe.precision.moments
        planned = total_on_device(measure_units(plan.of_rank(rank).buffers, names, moments))
        foretold = stage.phases["backward"] if rank in firsts else planned
        are_equal = all(states[kind] == planned[kind] == foretold[kind] for kind in STATES)
        rows.append(Counted(plan.title, rank, are_equal, predicted, counted))
    return replace(
        max(rows, key=lambda each: abs(each.ratio - 1)), are_states_equal=all(each.are_states_equal for each in rows)
    )


def _mean_of_place(plan: Plan, rank: int, ranks: Sequence[Held]) -> list[int]:
    """Bytes that ranks at one place of the pipeline have on average, behind each forward."""
    place = plan.topology.index("pp", rank)
    found = [counted for each, (_, counted) in enumerate(ranks) if plan.topology.index("pp", each) == place]
    return [sum(each) // len(found) for each in zip(*found, strict=True)]


def count_layouts(recipes: Iterable[Recipe], pool: RankPool) -> Iterator[Counted]:
    """Each recipe's layout, counted on ranks of this machine."""
    for recipe in recipes:
        world = make_plan(recipe, load_config(recipe.model)).topology.world
        yield compare(recipe, pool.run(world, count, recipe, timeout_s=300))


def estimated_recipes() -> Iterator[Recipe]:
    """Models without formulas, on one rank, in bf16: what is kept of layers, and what of their inputs."""
    for (family, changes), policy in product(ESTIMATED.items(), ESTIMATED_POLICIES):
        model = Model(family=family, config={})
        known = load_config(model).to_dict()
        values = {
            **WIDTHS,
            "num_hidden_layers": 4,
            "pad_token_id": None,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **changes,
        }
        yield Recipe(
            batch=Batch(sequences_per_step=2, sequences_per_microbatch=2, context=128),
            model=replace(model, config={key: value for key, value in values.items() if key in known}),
            precision=Precision(compute="bf16"),
            memory=Memory(policy, chunked_loss=False, compile="never"),  # type: ignore[arg-type]
            launch=Launch(ranks=1, device="cpu", threads_per_rank=1),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--estimated", action="store_true", help="models without formulas in place of random layouts")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    drawn = (draw_recipe(options.seed, number) for number in range(options.layouts))
    recipes = estimated_recipes() if options.estimated else drawn
    rows = []
    with closing(RankPool(max(RANKS), "framework.train.build")) as pool:
        for each in count_layouts(recipes, pool):
            rows.append(each)
            states = "equal" if each.are_states_equal else "DIFFER"
            print(
                f"{each.ratio:6.3f}  {each.predicted:>12,} of {each.counted:>12,}  states {states}  {each.layout}",
                flush=True,
            )
    worst = max(rows, key=lambda each: abs(each.ratio - 1))
    print(f"states equal in {sum(each.are_states_equal for each in rows)} of {len(rows)} layouts")
    within = sum(abs(each.ratio - 1) <= WITHIN for each in rows)
    print(f"activations within {WITHIN:.0%} in {within} of {len(rows)} layouts")
    print(f"activations: the worst of all ranks is {worst.ratio - 1:+.1%}, {worst.layout}")
    if options.json:
        options.json.write_text(json.dumps([asdict(each) | {"ratio": each.ratio} for each in rows], indent=1))


if __name__ == "__main__":
    main()
