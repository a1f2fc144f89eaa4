"""Rules between the keys of a recipe. Each rule names the keys that it reads and stays silent where one of them is wrong
already, so that a mistake is reported once and with its own reason."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from framework.recipe.clusters import find_cluster_problems
from framework.recipe.context_rules import (
    find_attention_problems,
    find_degree_problems,
    find_head_problems,
    find_length_problems,
)
from framework.recipe.deadlines import find_deadline_problems
from framework.recipe.derive import (
    count_nodes,
    count_ranks,
    count_virtual_stages,
    derive,
    find_batch_problems,
    find_node_problems,
    find_statement_problems,
    find_world_problems,
)
from framework.recipe.elastic import find_range_problems
from framework.recipe.families import find_family_problems
from framework.recipe.launch_rules import launch_rules
from framework.recipe.layout_keys import reads_layout
from framework.recipe.memory_rules import (
    find_activation_offload_problems,
    find_checkpointing_problems,
    find_fp8_problems,
    find_moments_problems,
    find_offload_problems,
    find_precision_problems,
)
from framework.recipe.origins import origin_of
from framework.recipe.place_rules import find_checkpoint_root_problems, find_run_root_problems
from framework.recipe.problem import Problem, render_problems
from framework.recipe.schema import Optim, Pipeline, Recipe, Zero
from framework.recipe.text_rules import find_text_problems
from framework.recipe.track_rules import find_wandb_problems

__all__ = ["Problem", "check_recipe", "render_problems"]

Rule = Callable[[Recipe], Iterator[Problem]]

COUNTED = (
    "launch.kind",
    "launch.ranks",
    "launch.nodes",
    "launch.ranks_per_node",
)  # what the number of ranks is read from

DEGREES = tuple(f"parallel.{name}" for name in ("dp", "tp", "pp", "cp"))
EXPERTS = ("parallel.ep", "parallel.expert_tp")
MIXTURE = (
    *(f"parallel.{name}" for name in ("ep", "expert_overlap", "expert_hierarchical")),
    *(f"model.{name}" for name in ("experts", "expert_capacity", "expert_drop")),
)
CHECKPOINTING = tuple(
    f"memory.{name}" for name in ("activation_checkpointing", "kept_operations", "budget_gb", "compile")
)

_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")  # what folders, wandb ids and SLURM job names all take


def check_recipe(recipe: Recipe, origins: Mapping[str, str], broken: Collection[str] = ()) -> list[Problem]:
    """Everything that contradicts itself in a recipe whose single values are sound; `broken`: keys that are not."""
    problems: list[Problem] = []
    is_open = recipe.parallel.layout == "auto"  # its rules are asked of the layout that is chosen
    for reads, rule in _rules():
        if is_open and reads_layout(reads):
            continue
        wrong = [*broken, *(problem.key for problem in problems)]
        if not any(key == read or key.startswith(f"{read}.") for key in wrong for read in reads):
            found = rule(recipe)
            problems += [replace(problem, origin=origin_of(origins, problem.key)) for problem in found]
    return problems


def layout_rules() -> list[tuple[tuple[str, ...], Rule]]:
    """The rules that read a key of the layout, with all keys or groups that they read."""
    return [(reads, rule) for reads, rule in _rules() if reads_layout(reads)]


def _rules() -> tuple[tuple[tuple[str, ...], Rule], ...]:
    """(keys or groups that the rule reads, rule), in the order in which one mistake hides another."""
    return (
        (("model.family", "model.weights"), find_family_problems),
        (("parallel.cp", "parallel.context"), find_degree_problems),
        (("parallel.cp", "parallel.context", "batch.context"), find_length_problems),
        (("parallel.tp", "parallel.cp", "parallel.context", "model.config"), find_head_problems),
        (("parallel.cp", "model.attention"), find_attention_problems),
        (MIXTURE, _experts),
        (("parallel.dp", "launch.spares", *COUNTED), find_range_problems),
        ((*DEGREES, *COUNTED), find_node_problems),
        ((*DEGREES, *EXPERTS, *COUNTED), find_world_problems),
        (("batch.sequences_per_step", "batch.tokens_per_step"), find_statement_problems),
        ((*DEGREES, *COUNTED, "batch"), find_batch_problems),
        ((*DEGREES, *COUNTED, "zero"), _zero),
        (("parallel.sequence", "parallel.overlap", "memory.gathered_inputs"), _needs_sequence),
        (CHECKPOINTING, find_checkpointing_problems),
        (
            ("parallel.pp", *(f"pipeline.{name}" for name in ("schedule", "virtual_stages", "layers", "table"))),
            _stages,
        ),
        (("parallel.pp", "pipeline.fill_bubbles", "train.validate_every_steps"), _bubbles),
        ((*DEGREES, *COUNTED, "batch", "pipeline.schedule", "pipeline.table"), _microbatches),
        (
            (
                "memory.offload",
                "zero.stage",
                "launch.device",
                "precision.moments",
                "precision.master",
                "model.router_bias_rate",
            ),
            find_offload_problems,
        ),
        (
            ("memory.offload.activations", "memory.activation_checkpointing", "launch.device"),
            find_activation_offload_problems,
        ),
        (("precision",), find_precision_problems),
        (("precision.compute", "memory.compile"), find_fp8_problems),
        (("optim.schedule", "train.steps", "train.epochs"), _schedule),
        (("optim.name", "optim.betas", "optim.eps", "optim.momentum"), _optimizer),
        (("precision.moments", "optim.name", "optim.momentum"), find_moments_problems),
        (("optim.clip_norm",), _clipping),
        (("optim.groups",), _group_patterns),
        (("model.freeze",), _freeze_patterns),
        (("data.sources",), _sources),
        (("data.bpe_vocab", "model.tokenizer", "model.weights"), _tokenizer),
        (("data.bpe_vocab", "model.config", "model.weights"), _vocabulary),
        (("model.weights", "model.revision"), _revision),
        (("model.weights", "model.config_file"), _config_file),
        (("data.validation", "train.validate_every_steps"), _validation),
        (("checkpoint.every_minutes", "checkpoint.interval", "checkpoint.mtbf_hours"), _checkpoint),
        (("run.root",), find_run_root_problems),
        (("checkpoint.root",), find_checkpoint_root_problems),
        ((*COUNTED, *DEGREES, "checkpoint.neighbor_copies", "checkpoint.neighbor_every_steps"), _neighbors),
        (("train.on_spike", "checkpoint.every_steps", "checkpoint.every_minutes", "checkpoint.interval"), _rewinds),
        ((*COUNTED, *DEGREES, "track.profile_steps", "track.profile_ranks"), _profile),
        (("checkpoint.keep_best", "train.validate_every_steps", "pipeline.fill_bubbles"), _best),
        (("run",), _run),
        (("track.wandb",), find_wandb_problems),
        ((), find_text_problems),
        *launch_rules(),
        (("launch",), find_deadline_problems),
        (("cluster",), find_cluster_problems),
    )


def _experts(recipe: Recipe) -> Iterator[Problem]:
    parallel = recipe.parallel
    inner = parallel.expert_hierarchical
    if recipe.model.experts != "auto" and (parallel.ep > 1 or recipe.model.expert_capacity is not None):
        message = (
            "experts that tokens are sent to are multiplied by Meshwright, not by an implementation of Hugging Face's"
        )
        yield Problem("model.experts", recipe.model.experts, message, "model.experts=auto")
    if recipe.model.expert_drop != "weight" and recipe.model.expert_capacity is None:
        message = "without model.expert_capacity nothing is dropped"
        yield Problem(
            "model.expert_drop", recipe.model.expert_drop, message, "leave it out; or model.expert_capacity=1.25"
        )
    if parallel.ep == 1:
        for name, value, off in (
            ("expert_overlap", parallel.expert_overlap, False),
            ("expert_hierarchical", inner, None),
        ):
            if value != off:
                message = "with parallel.ep=1 no token is sent to an expert"
                yield Problem(
                    f"parallel.{name}", value, message, f"leave it out (~parallel.{name}); or parallel.ep=2 or more"
                )
    elif isinstance(inner, int) and parallel.ep % inner:
        legal = ", ".join(str(degree) for degree in range(2, parallel.ep + 1) if parallel.ep % degree == 0)
        message = f"does not divide the parallel.ep={parallel.ep} ranks that have different experts"
        yield Problem("parallel.expert_hierarchical", inner, message, f"one of {legal}; node; or null")


def _zero(recipe: Recipe) -> Iterator[Problem]:
    within, batch = recipe.zero.shard_within, count_ranks(recipe) // (recipe.parallel.tp * recipe.parallel.pp)
    if isinstance(within, int) and batch % within:
        legal = ", ".join(str(degree) for degree in range(1, batch + 1) if batch % degree == 0)
        message = f"does not divide the {batch} ranks among which is sharded (dp * cp)"
        yield Problem("zero.shard_within", within, message, f"one of {legal}; or null for all")
    defaults = Zero()
    if recipe.zero.stage and recipe.zero.optimizer_within == "all" and within is None:
        message = "zero.shard_within=null leaves no replicas: all ranks divide the optimizer state already"
        fix = "leave it out (~zero.optimizer_within); or zero.shard_within=node"
        yield Problem("zero.optimizer_within", "all", message, fix)
    sharded = (1, 2, 3)
    for name, stages in (
        ("shard_within", sharded),
        ("optimizer_within", sharded),
        ("bucket_bytes", sharded),
        ("accumulate", (2, 3)),
        ("keep_gathered", (3,)),
    ):
        value = getattr(recipe.zero, name)
        if recipe.zero.stage not in stages and value != getattr(defaults, name):
            message = f"zero.stage={recipe.zero.stage} has no use for it"
            fix = f"leave it out (~zero.{name}); or zero.stage={' or '.join(map(str, stages))}"
            yield Problem(f"zero.{name}", value, message, fix)


def _needs_sequence(recipe: Recipe) -> Iterator[Problem]:
    for key, value, default in (
        ("parallel.overlap", recipe.parallel.overlap, "auto"),
        ("memory.gathered_inputs", recipe.memory.gathered_inputs, "keep"),
    ):
        if not recipe.parallel.sequence and value not in (default, "never"):
            message = "parallel.sequence=false gathers no inputs, so it would do nothing"
            yield Problem(key, value, message, f"leave it out (~{key}); or parallel.sequence=true")


def _stages(recipe: Recipe) -> Iterator[Problem]:
    pipeline, pp, virtual = recipe.pipeline, recipe.parallel.pp, count_virtual_stages(recipe.pipeline)
    legal = {"interleaved": "2 or more", "zbv": "2", "dualpipe_v": "2"}.get(pipeline.schedule, "1")
    if pipeline.table is None and (virtual < 2 if legal == "2 or more" else str(virtual) != legal):
        message = f"pipeline.schedule={pipeline.schedule} has {legal} on each rank"
        fix = "pipeline.virtual_stages=null"
        if legal == "1":
            fix += "; or pipeline.schedule=interleaved"
        yield Problem("pipeline.virtual_stages", virtual, message, fix)
    elif pipeline.layers is not None and (len(pipeline.layers) != pp * virtual or min(pipeline.layers) < 1):
        message = f"needs a number of layers, at least 1, for each of pp * virtual_stages = {pp} * {virtual} stages"
        yield Problem("pipeline.layers", pipeline.layers, message, "null, to cut by cost; or as many numbers")
    if pipeline.table is not None and pipeline.schedule != Pipeline().schedule:
        message = f"pipeline.table={pipeline.table} is a schedule as well"
        yield Problem("pipeline.schedule", pipeline.schedule, message, "leave one of them out")


def _bubbles(recipe: Recipe) -> Iterator[Problem]:
    key, fills = "pipeline.fill_bubbles", recipe.pipeline.fill_bubbles
    if fills == "none":
        return
    if recipe.parallel.pp == 1:
        yield Problem(key, fills, "one stage is never idle: there are no bubbles with parallel.pp=1", f"{key}=none")
    elif recipe.train.validate_every_steps is None:
        message = "there is no validation: train.validate_every_steps=null"
        yield Problem(key, fills, message, f"{key}=none; or train.validate_every_steps=100")


def _microbatches(recipe: Recipe) -> Iterator[Problem]:
    if recipe.pipeline.schedule != "dualpipe_v" or recipe.pipeline.table is not None:
        return
    derived = derive(recipe)
    needed, each = 2 * derived.pp, derived.dp * derived.sequences_per_microbatch
    if derived.accumulation < needed:
        message = f"dualpipe_v on {derived.pp} ranks needs {needed} microbatches in a step, and there are {derived.accumulation}"
        fix = f"batch.sequences_per_step={needed * each} or more; or pipeline.schedule=zbv"
        yield Problem("pipeline.schedule", "dualpipe_v", message, fix)


def _schedule(recipe: Recipe) -> Iterator[Problem]:
    schedule, steps = recipe.optim.schedule, recipe.train.steps
    if recipe.train.epochs is not None:
        return  # judged when the steps are known: launch/epochs.py
    warmup, decay = schedule.warmup_steps, schedule.decay_steps
    if warmup > steps:
        message = f"the warm-up is longer than the run of train.steps={steps}"
        yield Problem(
            "optim.schedule.warmup_steps", warmup, message, f"at most {steps}; or train.steps={warmup} and more"
        )
    if decay is None:
        return
    if schedule.name != "wsd":
        fix = "optim.schedule.decay_steps=null; or optim/schedule=wsd"
        yield Problem("optim.schedule.decay_steps", decay, f"only wsd has a decay of its own, not {schedule.name}", fix)
    elif warmup <= steps < warmup + decay:
        message = f"warm-up and decay, {warmup} + {decay} steps, are longer than the run of train.steps={steps}"
        fix = (
            f"optim.schedule.decay_steps={steps - warmup} or less"
            if warmup < steps
            else f"train.steps={warmup + decay}"
        )
        yield Problem("optim.schedule.decay_steps", decay, message, fix)


def _optimizer(recipe: Recipe) -> Iterator[Problem]:
    optim, default = recipe.optim, Optim()
    for name, owners in (("betas", ("adamw", "lion")), ("eps", ("adamw",)), ("momentum", ("sgd",))):
        value = getattr(optim, name)
        if optim.name not in owners and value != getattr(default, name):
            fix = f"leave it out (~optim.{name}); or optim={' or optim='.join(owners)}"
            yield Problem(f"optim.{name}", _plain(value), f"{optim.name} has no {name}, so it would do nothing", fix)
    if any(beta >= 1.0 for beta in optim.betas):
        yield Problem(
            "optim.betas", _plain(optim.betas), "at 1 a moment never forgets; each must be below 1", "0.9 to 0.999"
        )
    if optim.momentum >= 1.0:
        yield Problem("optim.momentum", optim.momentum, "at 1 it never forgets; it must be below 1", "0.9")


def _clipping(recipe: Recipe) -> Iterator[Problem]:
    if recipe.optim.clip_norm == 0.0:
        message = "a gradient clipped to norm 0 trains nothing"
        yield Problem("optim.clip_norm", 0.0, message, "optim.clip_norm=null for no clipping")


def _group_patterns(recipe: Recipe) -> Iterator[Problem]:
    for name, group in recipe.optim.groups.items():
        yield from _pattern(f"optim.groups.{name}.pattern", group.pattern)


def _freeze_patterns(recipe: Recipe) -> Iterator[Problem]:
    for pattern in recipe.model.freeze:
        yield from _pattern("model.freeze", pattern)


def _pattern(key: str, pattern: str) -> Iterator[Problem]:
    try:
        re.compile(pattern)
    except re.error as error:
        fix = "escape . [ ( with a backslash where they are meant as such"
        yield Problem(key, pattern, f"not a regular expression: {error}", fix)


def _sources(recipe: Recipe) -> Iterator[Problem]:
    sources = recipe.data.sources
    if not sources:
        fix = "a data recipe such as data=python_stdlib; or data.sources.NAME.path=..."
        yield Problem("data.sources", None, "there is nothing to train on", fix)
    elif not any(source.weight for source in sources.values()):
        first = next(iter(sources))
        message = "every source has weight 0, which leaves it out"
        yield Problem(f"data.sources.{first}.weight", 0.0, message, f"data.sources.{first}.weight=1")


def _tokenizer(recipe: Recipe) -> Iterator[Problem]:
    vocab = recipe.data.bpe_vocab
    given = next((name for name in ("tokenizer", "weights") if getattr(recipe.model, name) is not None), None)
    if vocab is not None and given is not None:
        has = f"model.{given}={getattr(recipe.model, given)} has a tokenizer already; a second one would be trained"
        yield Problem("data.bpe_vocab", vocab, has, f"data.bpe_vocab=null; or model.{given}=null")
    elif vocab is None and given is None:
        fix = "model.tokenizer=<hub name or folder>; or data.bpe_vocab=4096 to train one on the data"
        yield Problem("model.tokenizer", None, "there is no tokenizer", fix)


def _vocabulary(recipe: Recipe) -> Iterator[Problem]:
    if (
        recipe.model.weights is None
        and "vocab_size" in recipe.model.config
        and recipe.model.config["vocab_size"] is None
    ):
        message = "the model's recipe takes it from data.bpe_vocab, which is null"
        yield Problem("model.config.vocab_size", None, message, "model.config.vocab_size=<entries of the tokenizer>")


def _revision(recipe: Recipe) -> Iterator[Problem]:
    if recipe.model.revision is not None and recipe.model.weights is None:
        message = "a revision of model.weights, which are not set"
        yield Problem("model.revision", recipe.model.revision, message, "null; or model.weights=owner/name")


def _config_file(recipe: Recipe) -> Iterator[Problem]:
    model = recipe.model
    if model.weights is not None and model.config_file is not None:
        message = f"model.weights={model.weights} has a config of its own"
        yield Problem(
            "model.config_file", model.config_file, message, "give one; model.config.KEY changes a value of it"
        )


def _validation(recipe: Recipe) -> Iterator[Problem]:
    if recipe.train.validate_every_steps is not None and recipe.data.validation == 0.0:
        message = f"no documents are held out, but train.validate_every_steps={recipe.train.validate_every_steps}"
        yield Problem("data.validation", 0.0, message, "data.validation=0.005; or train.validate_every_steps=null")


def _profile(recipe: Recipe) -> Iterator[Problem]:
    steps, ranks, world = recipe.track.profile_steps, recipe.track.profile_ranks, count_ranks(recipe)
    if steps is not None and steps[0] > steps[1]:
        fix = f"track.profile_steps=[{steps[1]},{steps[0]}]"
        yield Problem("track.profile_steps", list(steps), "the first step comes after the last", fix)
    outside = [rank for rank in ranks if rank >= world]
    if steps is not None and (outside or not ranks):
        message = f"of {world} ranks, which have the numbers 0 to {world - 1}, these record nothing"
        yield Problem("track.profile_ranks", ranks, message, "track.profile_ranks=[0]")


def _best(recipe: Recipe) -> Iterator[Problem]:
    key = "checkpoint.keep_best"
    if recipe.checkpoint.keep_best and recipe.train.validate_every_steps is None:
        message = "nothing says which is the best: train.validate_every_steps=null"
        yield Problem(key, True, message, f"{key}=false; or train.validate_every_steps=100")
    elif recipe.checkpoint.keep_best and recipe.pipeline.fill_bubbles != "none":
        message = "a validation in bubbles ends a step late, when its weights are no more"
        yield Problem(key, True, message, f"{key}=false; or pipeline.fill_bubbles=none")


def _rewinds(recipe: Recipe) -> Iterator[Problem]:
    rules = recipe.checkpoint
    if recipe.train.on_spike == "rewind" and not (rules.every_steps or rules.every_minutes or rules.interval):
        message = "a rewind goes back to a checkpoint, and none is saved before the end"
        yield Problem("train.on_spike", "rewind", message, "checkpoint.every_steps=100; or train.on_spike=skip")


def _checkpoint(recipe: Recipe) -> Iterator[Problem]:
    if recipe.checkpoint.every_minutes == 0.0:
        yield Problem(
            "checkpoint.every_minutes", 0.0, "would save without end", "checkpoint.every_minutes=null for never"
        )
    if recipe.checkpoint.interval is not None and not recipe.checkpoint.mtbf_hours:
        message = "needs checkpoint.mtbf_hours: how often the run fails says how often it should save"
        yield Problem(
            "checkpoint.interval",
            recipe.checkpoint.interval,
            message,
            "checkpoint.mtbf_hours=8, say (jobs of 1,024 GPUs: arXiv 2410.21680); or checkpoint.interval=null",
        )
    elif recipe.checkpoint.interval is None and recipe.checkpoint.mtbf_hours is not None:
        yield Problem(
            "checkpoint.mtbf_hours",
            recipe.checkpoint.mtbf_hours,
            "nobody asks for it: checkpoint.interval=null",
            "checkpoint.interval=young_daly; or leave it out",
        )


def _neighbors(recipe: Recipe) -> Iterator[Problem]:
    copies, every, nodes = (
        recipe.checkpoint.neighbor_copies,
        recipe.checkpoint.neighbor_every_steps,
        count_nodes(recipe),
    )
    key = "checkpoint.neighbor_copies"
    if copies >= nodes and copies:
        message = (
            f"a copy lies on a node of its own, and beside a rank's there {'is' if nodes == 2 else 'are'} {nodes - 1}"
        )
        fix = f"{key}={nodes - 1}" if nodes > 1 else f"{key}=0; or launch=slurm with launch.nodes=2 or more"
        yield Problem(key, copies, message, fix)
    elif copies and every is None:
        message = "nothing says how often: checkpoint.neighbor_every_steps=null"
        yield Problem(key, copies, message, f"checkpoint.neighbor_every_steps=10, say; or {key}=0")
    elif every is not None and not copies:
        message = f"nobody holds a copy: {key}=0"
        yield Problem("checkpoint.neighbor_every_steps", every, message, f"{key}=1; or leave it out")


def _run(recipe: Recipe) -> Iterator[Problem]:
    for name in ("id", "name"):
        value = getattr(recipe.run, name)
        if value is not None and not _RUN_ID.fullmatch(value):
            message = "names a folder and a wandb run: letters, digits, . _ - only, 64 at most, none of . _ - first"
            cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("._-")[:64]
            yield Problem(f"run.{name}", value, message, f"run.{name}={cleaned}" if cleaned else "")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
