"""Layouts on the simulator beside one rank: loss and gradient norm of two steps, the second of which has read the update."""

import threading
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

import torch
from transformers import PretrainedConfig

from framework.comm.connect import Mesh, connect
from framework.data.pack import Microbatch
from framework.plan.plan import make_plan
from framework.recipe.schema import Memory, Model, Muon, Offload, Parallel, Pipeline, Recipe, Zero
from framework.train.build import build
from framework.train.step import TrainingRun, train_step
from framework.verify.evidence import make_batches
from framework.verify.layout import share
from tests.families import build_config, family
from tests.nccl.gpu import move_to_host
from tests.nccl.simulator import run_ranks
from tests.ranks.covering import cover_pairs
from tests.ranks.parity import CPU, small_recipe, topology_of
from tests.ranks.quantized import on_nodes
from tests.ranks.spare_model import SPARE

STEPS, LR = 2, 1e-2
TOLERANCE = 1e-5
# Plans and models are made under it: torch's default dtype and its random numbers belong to all threads.
BUILDING = threading.Lock()
Numbers = list[float]


@dataclass(frozen=True)
class Layout:
    """A tiny model on so many ranks. changes: of the model's config. freeze: patterns, as of the recipe. pack: as of it, too.
    on_node: ranks of each node, None: of the only one; reduce: `precision.reduce`; muon: trained by it, heads one by one, each
    shared by two ranks."""

    world: int
    accumulation: int = 1
    family: str = "llama"
    sequences: int = 36
    freeze: tuple[str, ...] = ()
    changes: tuple[tuple[str, Any], ...] = ()
    parallel: Parallel = field(default_factory=Parallel)
    zero: Zero = field(default_factory=lambda: Zero(stage=0))
    memory: Memory = field(default_factory=Memory)
    schedule: str = "1f1b"
    pack: Literal["concat", "documents"] = "concat"
    on_node: int | None = None
    reduce: Literal["fp32", "bf16"] = "fp32"
    muon: bool = False

    @property
    def recipe(self) -> Recipe:
        """In fp32, with the loss from logits, which a layer of its own then makes."""
        recipe = small_recipe(
            "fp32", self.world, self.accumulation, self.sequences, parallel=self.parallel, zero=self.zero
        )
        memory = replace(self.memory, compile="never", chunked_loss=False)
        pipeline = Pipeline(schedule=self.schedule)  # type: ignore[arg-type]
        data = replace(recipe.data, pack=self.pack)
        recipe = replace(recipe, memory=memory, pipeline=pipeline, model=Model(freeze=list(self.freeze)), data=data)
        recipe = replace(recipe, precision=replace(recipe.precision, reduce=self.reduce))
        if self.muon:
            muon = Muon(dtype="master", heads=True, ranks_per_matrix=2 if self.world > 1 else 1)
            recipe = replace(recipe, optim=replace(recipe.optim, name="muon", muon=muon))
        return recipe if self.on_node is None else on_nodes(recipe, self.on_node)

    @property
    def config(self) -> PretrainedConfig:
        """The model's."""
        config = build_config(SPARE if self.family == SPARE.name else family(self.family), **dict(self.changes))
        config.use_cache = False
        return config


def run(layout: Layout, serial: bool = False) -> list[Numbers]:
    """Each rank's numbers, on the simulator."""
    topology = topology_of(layout.recipe, layout.config)
    return run_ranks(topology, lambda mesh: train(layout, mesh), serial)


def train(layout: Layout, mesh: Mesh) -> Numbers:
    """The losses and norms of a layout's steps on one rank."""
    trained, batches = build_layout(layout, mesh)
    found = []
    for step, microbatches in enumerate(batches):
        values = train_step(trained, microbatches, step, LR).read()
        found += [values.loss, values.gradient_norm]
    return found


def build_layout(layout: Layout, mesh: Mesh) -> tuple[TrainingRun, list[list[Microbatch]]]:
    """A rank's run, and its microbatches of each step."""
    recipe, config = layout.recipe, layout.config
    with BUILDING:
        built = build(make_plan(recipe, config), mesh)
        packs = layout.pack == "documents"
        batches = make_batches(config, STEPS, layout.sequences, recipe.batch.context, 11, packs)
        shared = [share(batch, recipe.batch.sequences_per_microbatch, mesh) for batch in batches]
    if mesh.device.type == "cuda":
        shared = [[microbatch.map(move_to_host) for microbatch in microbatches] for microbatches in shared]
    return built, shared


@cache
def train_alone(
    family: str, sequences: int, freeze: tuple[str, ...], changes: tuple[tuple[str, Any], ...], muon: bool
) -> Numbers:
    """The numbers of one rank, without a layout."""
    layout = Layout(1, 1, family, sequences, freeze, changes, muon=muon)
    return train(layout, connect(topology_of(layout.recipe, layout.config), CPU))


def find_error(layout: Layout, serial: bool = False) -> float:
    """The worst relative error of any rank's numbers."""
    alone = train_alone(layout.family, layout.sequences, layout.freeze, layout.changes, layout.muon)
    expected = torch.tensor(alone, dtype=torch.float64)
    found = torch.tensor(run(layout, serial), dtype=torch.float64)
    return float(((found - expected) / expected).abs().nan_to_num(nan=torch.inf).max())


Z3 = Zero(stage=3)
REGATHER = Memory(gathered_inputs="regather")
TIED, UNTIED, EIGHT_LAYERS = ("tie_word_embeddings", True), ("tie_word_embeddings", False), ("num_hidden_layers", 8)

LAYOUTS = {
    "dp 2, zero 0": Layout(2),
    "dp 2, zero 2": Layout(2, 3, zero=Zero(stage=2)),
    "dp 2, zero 3": Layout(2, 3, zero=Z3),
    "dp 2, zero 3, local, kept": Layout(2, 3, zero=replace(Z3, keep_gathered=True, accumulate="local")),
    "dp 2, zero 3, full": Layout(2, zero=Z3, memory=Memory("full")),
    "dp 2, zero 3, sqrt": Layout(2, zero=Z3, memory=Memory("sqrt")),
    "dp 2, zero 3, offloaded": Layout(2, zero=Z3, memory=Memory(offload=Offload(activations=1.0, parameters=1.0, optimizer=1.0))),
    "dp 2, zero 2, layers left out": Layout(2, 3, "spare", zero=Zero(stage=2)),
    "dp 2, zero 3, kept, layers left out": Layout(2, 3, "spare", zero=replace(Z3, keep_gathered=True)),
    "dp 3, zero 1": Layout(3, 3, zero=Zero(stage=1)),
    "dp 4, hsdp": Layout(4, zero=replace(Z3, shard_within=2)),
    "dp 4, hsdp, divided update": Layout(4, zero=replace(Z3, shard_within=2, optimizer_within="all")),
    "dp 4, zero 3, second copy": Layout(4, 3, zero=replace(Z3, secondary_shard=2)),
    "dp 4, zero 3, second copy, offloaded": Layout(
        4, zero=replace(Z3, secondary_shard=2), memory=Memory(offload=Offload(parameters=1.0, optimizer=1.0))
    ),
    "tp 2": Layout(2, parallel=Parallel(tp=2, sequence=False)),
    "tp 2, sequence": Layout(2, parallel=Parallel(tp=2)),
    "tp 2, overlap": Layout(2, parallel=Parallel(tp=2, overlap="always")),
    "tp 2, regather": Layout(2, parallel=Parallel(tp=2), memory=replace(REGATHER, activation_checkpointing="selective")),
    "tp 2, dp 2, zero 3": Layout(4, parallel=Parallel(tp=2), zero=Z3),
    "tp 2, dp 2, zero 3, muon": Layout(4, parallel=Parallel(tp=2), zero=Z3, muon=True),
    "dp 4, hsdp, divided update, muon": Layout(4, zero=replace(Z3, shard_within=2, optimizer_within="all"), muon=True),
    "cp 2, ring": Layout(2, parallel=Parallel(cp=2)),
    "cp 2, ulysses": Layout(2, parallel=Parallel(cp=2, context="ulysses")),
    "cp 2, gather": Layout(2, parallel=Parallel(cp=2, context="gather")),
    "cp 4, both": Layout(4, parallel=Parallel(cp=4, context=[2, 2])),
    "ep 2": Layout(2, family="mixtral", parallel=Parallel(ep=2)),
    "ep 2, overlap": Layout(2, family="mixtral", parallel=Parallel(ep=2, expert_overlap=True)),
    "ep 2, dp 4, zero 3": Layout(4, family="mixtral", parallel=Parallel(ep=2), zero=Z3),
    "ep 4 over nodes, overlap": Layout(4, family="mixtral", parallel=Parallel(ep=4, expert_overlap=True), on_node=2),
    "ep 2, tp 2": Layout(2, family="deepseek_v3", parallel=Parallel(ep=2, tp=2)),
    "pp 2": Layout(2, 3, parallel=Parallel(pp=2)),
    "pp 3": Layout(3, 3, parallel=Parallel(pp=3)),
    "pp 2, tied": Layout(2, 3, "gpt2", parallel=Parallel(pp=2)),
    "pp 2, gpipe": Layout(2, 3, parallel=Parallel(pp=2), schedule="gpipe"),
    "pp 2, zb_h1": Layout(2, 3, parallel=Parallel(pp=2), schedule="zb_h1"),
    "pp 2, dp 2, zero 3": Layout(4, 3, parallel=Parallel(pp=2), zero=Z3),
    "pp 2, zbv": Layout(2, 4, changes=(EIGHT_LAYERS,), parallel=Parallel(pp=2), schedule="zbv"),
    "pp 2, dp 2, zero 3, dualpipe_v": Layout(
        4, 4, sequences=32, changes=(EIGHT_LAYERS,), parallel=Parallel(pp=2), zero=Z3, schedule="dualpipe_v"
    ),
    "pp 2, dp 2, zero 2, interleaved": Layout(
        4, 4, sequences=32, changes=(EIGHT_LAYERS,), parallel=Parallel(pp=2), zero=Zero(stage=2), schedule="interleaved"
    ),
    "pp 2, tp 2, cp 2, zero 1": Layout(8, 3, parallel=Parallel(pp=2, tp=2, cp=2), zero=Zero(stage=1)),
    "pp 2, tp 2, dp 2, zero 3, zb_h1": Layout(
        8, 3, changes=(EIGHT_LAYERS,), parallel=Parallel(pp=2, tp=2), zero=Z3, schedule="zb_h1"
    ),
}  # fmt: skip

# Factors of a covering array: any two of their values that may meet do so in a row of it.
MESHES = {
    "dp 2": Layout(2),
    "dp 4": Layout(4),
    "tp 2": Layout(2, parallel=Parallel(tp=2)),
    "tp 2, overlap, dp 2": Layout(4, parallel=Parallel(tp=2, overlap="always")),
    "cp 2, ring, dp 2": Layout(4, parallel=Parallel(cp=2)),
    "cp 2, ulysses": Layout(2, parallel=Parallel(cp=2, context="ulysses")),
    "ep 2, overlap": Layout(2, family="mixtral", parallel=Parallel(ep=2, expert_overlap=True)),
    "ep 2, tp 2, dp 2": Layout(4, family="mixtral", parallel=Parallel(ep=2, tp=2)),
    "pp 2, dp 2": Layout(4, parallel=Parallel(pp=2)),
    "pp 2, tp 2": Layout(4, parallel=Parallel(pp=2, tp=2)),
    "pp 2, cp 2": Layout(4, parallel=Parallel(pp=2, cp=2)),
    "pp 2, tied": Layout(2, family="gpt2", parallel=Parallel(pp=2)),
}
ZEROS = {
    "zero 0": Zero(stage=0),
    "zero 1": Zero(stage=1),
    "zero 2, local": Zero(stage=2, accumulate="local"),
    "zero 3": Z3,
    "zero 3, kept": replace(Z3, keep_gathered=True),
    "hsdp": replace(Z3, shard_within=2),
    "hsdp, divided": replace(Z3, shard_within=2, optimizer_within="all", prefetch_units=2),
}
MEMORIES = {
    "none": Memory(),
    "full": Memory("full"),
    "sqrt, regather": Memory("sqrt", gathered_inputs="regather"),
    "offloaded": Memory("selective", offload=Offload(activations=1.0, parameters=1.0, optimizer=1.0)),
    "activations away": Memory("full", offload=Offload(activations=1.0)),
}
SCHEDULES = {
    "1": (1, "1f1b"), "3": (3, "1f1b"), "gpipe": (3, "gpipe"), "zb_h1": (3, "zb_h1"), "interleaved": (4, "interleaved"),
    "zbv": (4, "zbv"), "dualpipe_v": (4, "dualpipe_v"),
}  # fmt: skip
DEEP = ("interleaved", "zbv", "dualpipe_v")  # two stages a rank


def may_meet(mesh: str, zero: str, memory: str, schedule: str, serial: bool) -> bool:
    """Whether a recipe may have all of these."""
    layout = MESHES[mesh]
    replicas = layout.world // (layout.parallel.tp * layout.parallel.pp)
    if layout.parallel.ep > 1:
        replicas //= layout.parallel.ep
    return (
        (schedule != "1" if layout.parallel.pp > 1 else schedule in ("1", "3"))
        and (layout.family == "llama" or schedule not in DEEP)
        and (not zero.startswith("hsdp") or replicas >= 4)
        and ("regather" not in memory or layout.parallel.tp > 1)
        and (memory != "offloaded" or ZEROS[zero].stage == 3)
    )


def cover() -> dict[str, tuple[Layout, bool]]:
    """(layout, whether a device runs one message at a time), by name."""
    rows = cover_pairs([list(MESHES), list(ZEROS), list(MEMORIES), list(SCHEDULES), [False, True]], may_meet)
    return {" | ".join([*row[:4], "serial"][: 4 + row[4]]): (combine(*row[:4]), row[4]) for row in rows}


def find_first(rows: dict[str, tuple[Layout, bool]]) -> set[str]:
    """Names of the first rows with each value of each factor."""
    seen: set[str] = set()
    found = set()
    for name in rows:
        new = set(name.split(" | ")) - seen
        if new:
            seen |= new
            found.add(name)
    return found


def combine(mesh: str, zero: str, memory: str, schedule: str) -> Layout:
    """The layout of a row."""
    accumulation, name = SCHEDULES[schedule]
    changes = (EIGHT_LAYERS,) if name in DEEP else ()
    return replace(
        MESHES[mesh], accumulation=accumulation, schedule=name, sequences=32 if accumulation == 4 else 36,
        changes=changes, zero=ZEROS[zero], memory=MEMORIES[memory],
    )  # fmt: skip


# Both ends and a tied head, small ones, a first stage, a last stage, halves of a layer, experts, routers, all but an end.
FREEZES = {
    "embedding": ("embed_tokens|wte",),
    "head": ("lm_head",),
    "norms": ("norm|ln_",),
    "first layers": (r"\.[01]\.",),
    "all but the first layer": (r"^(?!.*\.0\.)",),
    "attention": ("attn",),
    "mlp": ("mlp|block_sparse_moe|experts",),
    "routers": (r"gate\b|router",),
    "all but the head": ("^(?!lm_head)",),
    "all but the embedding": ("^(?!.*(embed_tokens|wte))",),
}
# Beside each freeze: what starts communication that frozen parameters may not need.
FREEZABLE = {
    "tied, tp 2, regather": Layout(2, changes=(TIED,), parallel=Parallel(tp=2), memory=REGATHER),
    "tp 2, overlap, regather, zero 3": Layout(
        4, 2, parallel=Parallel(tp=2, overlap="always"), memory=replace(REGATHER, activation_checkpointing="sqrt"), zero=Z3
    ),
    "dp 4, zero 3, hsdp, divided, local": Layout(
        4, 3, zero=replace(Z3, shard_within=2, optimizer_within="all", accumulate="local", prefetch_units=2)
    ),
    "dp 2, zero 3, kept, offloaded": Layout(
        2, 2, zero=replace(Z3, keep_gathered=True), memory=Memory(offload=Offload(activations=1.0, parameters=1.0))
    ),
    "tied, pp 2, zb_h1, zero 3": Layout(4, 3, changes=(TIED,), parallel=Parallel(pp=2), zero=Z3, schedule="zb_h1"),
    "pp 2, tp 2, gpipe": Layout(4, 2, parallel=Parallel(pp=2, tp=2), memory=REGATHER, schedule="gpipe"),
    "cp 2, ring, zero 3": Layout(2, 2, parallel=Parallel(cp=2), zero=Z3),
    "cp 2, ulysses, tp 2": Layout(4, parallel=Parallel(cp=2, tp=2, context="ulysses")),
    "ep 2, overlap, zero 3": Layout(4, 3, "mixtral", parallel=Parallel(ep=2, expert_overlap=True), zero=Z3),
    "ep 4, hierarchical, tp 2": Layout(
        4, 1, "mixtral", parallel=Parallel(ep=4, tp=2, expert_tp=1, expert_hierarchical=2), memory=REGATHER
    ),
}  # fmt: skip
FROZEN = {
    f"{name}, {frozen} frozen": replace(layout, freeze=patterns)
    for name, layout in FREEZABLE.items()
    for frozen, patterns in FREEZES.items()
    if (layout.family == "mixtral" or frozen != "routers") and (TIED not in layout.changes or "head" not in frozen)
}
