"""Rules of the run: its model, data, checkpoints, tracking, and all of its texts; `method_rules.py` has those of training."""

import re
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from framework.object_store import is_url
from framework.output import CONTROLS, in_a_line
from framework.recipe.derive import count_nodes, count_ranks
from framework.recipe.environment import hide_secrets, is_secret, looks_secret
from framework.recipe.keys import flatten, nearest
from framework.recipe.method_rules import METHOD_RULES
from framework.recipe.plugins import added_names
from framework.recipe.problem import COUNTED, DEGREES, Findings, Problem, Rule, refuse, refuse_useless, rule
from framework.recipe.schema import Recipe, Source

# Names that folders, wandb ids and SLURM job names all accept.
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
# Limits of wandb's settings (wandb/sdk/wandb_settings.py): it would refuse such names when the run begins, and telemetry would be
# lost. Only its server refuses an unknown team.
PROJECT_CHARACTERS, TAG_CHARACTERS = 128, 64
NOT_IN_PROJECTS = "/\\#?%:"
# Keys whose own rules say how to give a secret.
OWN_SECRETS = ("launch.environment", "launch.set_up", "launch.sbatch")
# A prompt may have lines, and so may shell code.
MAY_HAVE_LINES = ("train.sample", "launch.set_up")
# Files of transformers that list its automatic configurations.
LISTS = ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")
NEAR = 3
# Families that have been there as long as the lists: without them the lists lie elsewhere, and the rule is silent.
OLD = {"gpt2", "llama"}


# --- model


@rule("model.family", "model.weights", "model.config_file")
def family(recipe: Recipe) -> Findings:
    """A family that transformers does not have. Silent where weights or a config file state the model, and where the lists cannot
    be read: building the model then refuses it."""
    family, strings = recipe.model.family, read_strings()
    added = added_names("model")
    if recipe.model.weights or recipe.model.config_file or family in (*strings, *added) or not strings >= OLD:
        return
    near = nearest(family.lower(), [*list_families(), *added], NEAR)
    fix = "a model_type, as the config.json of a model on the hub says it"
    if near:
        fix = f"did you mean {' or '.join(f'model.family={name}' for name in near)}?"
    yield "model.family", "no model type of the installed transformers", fix


@cache
def read_strings() -> frozenset[str]:
    """All strings of the lists: the families' names, and others. A name that is not among them is no family."""
    return frozenset(re.findall(r"[\"']([^\"'\n]*)[\"']", _read_lists()))


def list_families() -> list[str]:
    """The names that are listed with a configuration, for suggestions."""
    # ("albert", "AlbertConfig"), in a list of pairs, or "mlcd": "MLCDVisionConfig", in a dict.
    return [
        pair or entry
        for pair, entry in re.findall(r"\(\"([^\"]+)\", \"\w+Config\"|\"([^\"]+)\": \"\w+Config\"", _read_lists())
    ]


@cache
def _read_lists() -> str:
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return ""
    files = [Path(spec.origin).parent / name for name in LISTS]
    return "\n".join(file.read_text(encoding="utf-8") for file in files if file.is_file())


@rule("model.weights", "model.revision", "model.config_file")
def weights(recipe: Recipe) -> Findings:
    model = recipe.model
    if model.revision is not None and model.weights is None:
        yield "model.revision", "a revision of model.weights, which are not set", "null; or model.weights=owner/name"
    if model.weights is not None and model.config_file is not None:
        message = f"model.weights={model.weights} has a config of its own"
        yield "model.config_file", message, "give one; model.config.KEY changes a value of it"


# --- data


@rule("data.sources")
def sources(recipe: Recipe) -> Findings:
    sources = recipe.data.sources
    if not sources:
        fix = "a data recipe such as data=python_stdlib; or data.sources.NAME.path=..."
        yield Problem("data.sources", None, "there is nothing to train on", fix)
    elif not recipe.data.read:
        key = f"data.sources.{next(iter(sources))}.weight"
        yield Problem(key, 0.0, "every source has weight 0, which leaves it out", f"{key}=1")


@rule("data.sources", "data.temperature")
def blend(recipe: Recipe) -> Findings:
    data = recipe.data
    passes = {name: source.epochs for name, source in data.read.items()}
    if not any(passes.values()):
        return
    for name, count in passes.items():
        key = f"data.sources.{name}"
        if count is None:
            others = ", ".join(other for other in passes if passes[other])
            yield Problem(
                f"{key}.epochs", None, f"{others} is read by epochs, and this source by weight", f"{key}.epochs=1"
            )
        elif data.sources[name].weight != Source.weight:
            message = "epochs are given, from which the share of the source follows"
            yield Problem(f"{key}.weight", data.sources[name].weight, message, f"leave one of them out (~{key}.weight)")
    message = "epochs say how often each source is read"
    yield from refuse_useless(recipe, "data.temperature", message, "weights in place of data.sources.NAME.epochs")


@rule("data.sources", "data.chat_template", "data.train_on", "data.overlong", "data.pack", "data.bpe_vocab")
def conversations(recipe: Recipe) -> Findings:
    data = recipe.data
    for name, source in data.sources.items():
        given = [each for each in ("field", "messages", "pairs") if getattr(source, each) != getattr(Source, each)]
        if len(given) > 1:
            key = f"data.sources.{name}.{given[0]}"
            message = (
                f"a record has text or a conversation, or answers to compare, and data.sources.{name}.{given[1]} is set"
            )
            yield Problem(key, getattr(source, given[0]), message, f"leave one of them out (~{key})")
    if not data.has_conversations:
        for key in ("data.chat_template", "data.train_on", "data.overlong"):
            message = "no source has conversations, so it would do nothing"
            yield from refuse_useless(recipe, key, message, "data.sources.NAME.messages=messages")
        return
    if data.packing == "concat":
        message = "conversations that share a row would see one another"
        yield "data.pack", message, "leave it out (~data.pack), which is best_fit"
    if data.overlong != "skip" and data.packing == "documents":
        message = f"data.pack={data.pack} cuts what is too long at the ends of rows, so it would do nothing"
        yield "data.overlong", message, "leave it out (~data.overlong); or data.pack=best_fit"
    if data.bpe_vocab is not None and data.chat_template is None:
        message = "a tokenizer that is trained on the data has no chat template"
        yield Problem("data.chat_template", None, message, "data.chat_template=chatml, or a file with a template")


@rule("data.sources", "data.root", "data.bpe_vocab")
def imported_sources(recipe: Recipe) -> Findings:
    for name, source in recipe.data.sources.items():
        if not source.is_imported:
            continue
        key = f"data.sources.{name}"
        if source.conversation is not None:
            message = f"{key}.format={source.format} has token ids, of which none is known to be an assistant's"
            yield Problem(f"{key}.format", source.format, message, f"leave out {key}.messages and {key}.pairs")
        if recipe.data.bpe_vocab is not None:
            message = f"{key} has the ids of another tokenizer"
            yield "data.bpe_vocab", message, "data.bpe_vocab=null model.tokenizer=the one that made the ids"
        if is_url(recipe.data.root):
            message = f"{key} is read where it lies, beside which a node needs what was found about it"
            yield "data.root", message, "a folder that all nodes see"


@rule("data.mode", "data.sources", "data.root", "data.pack", "data.temperature", "train.epochs")
def streams(recipe: Recipe) -> Findings:
    data, key = recipe.data, "data.mode"
    if data.mode != "stream":
        return
    if is_url(data.root):
        message = "the shards of a stream are read from a folder that all nodes see"
        yield key, message, "data.root=FOLDER; or data.mode=prepared"
    if data.packing in ("best_fit", "alone"):
        fix = "data.pack=documents; or data.mode=prepared" if data.has_conversations else "data.mode=prepared"
        yield key, f"data.pack={data.packing} packs whole documents, of which all have to be known", fix
    if data.blends_by_tokens or recipe.train.epochs is not None:
        keys = "train.epochs" if recipe.train.epochs is not None else "shares of sources by their tokens"
        fix = "train.steps and weights; or data.mode=prepared"
        yield key, f"{keys} need the number of tokens, which is known at a stream's end", fix
    for name, source in data.read.items():
        if source.is_imported:
            yield key, f"data.sources.{name} has token ids: there is nothing to tokenize", "data.mode=prepared"


@rule("data.root", "data.cache_gb", "loss.reference")
def token_stores(recipe: Recipe) -> Findings:
    if not is_url(recipe.data.root):
        message = f"data.root={recipe.data.root} is a folder, whose files are read where they are"
        yield from refuse_useless(recipe, "data.cache_gb", message, "data.root=s3://bucket/path")
    elif recipe.loss.reference not in (None, "base"):
        message = f"its numbers are kept beside the tokens, and data.root={recipe.data.root} is in an object store"
        yield "loss.reference", message, "data.root=a folder that all nodes see; or loss.reference=base"


@rule("data.bpe_vocab", "model.tokenizer", "model.weights")
def tokenizer(recipe: Recipe) -> Findings:
    vocab = recipe.data.bpe_vocab
    given = next((name for name in ("tokenizer", "weights") if getattr(recipe.model, name) is not None), None)
    if vocab is not None and given is not None:
        has = f"model.{given}={getattr(recipe.model, given)} has a tokenizer already; a second one would be trained"
        yield "data.bpe_vocab", has, f"data.bpe_vocab=null; or model.{given}=null"
    elif vocab is None and given is None:
        fix = "model.tokenizer=<hub name or folder>; or data.bpe_vocab=4096 to train one on the data"
        yield Problem("model.tokenizer", None, "there is no tokenizer", fix)


@rule("data.bpe_vocab", "model.config", "model.weights")
def vocabulary(recipe: Recipe) -> Findings:
    if recipe.model.weights is None and recipe.model.config.get("vocab_size", 0) is None:
        message = "the model's recipe takes it from data.bpe_vocab, which is null"
        yield Problem("model.config.vocab_size", None, message, "model.config.vocab_size=<entries of the tokenizer>")


@rule("data.validation", "train.validate_every_steps")
def validation(recipe: Recipe) -> Findings:
    if recipe.train.validate_every_steps is not None and recipe.data.validation == 0.0:
        message = f"no documents are held out, but train.validate_every_steps={recipe.train.validate_every_steps}"
        yield "data.validation", message, "data.validation=0.005; or train.validate_every_steps=null"


# --- checkpoints


@rule("checkpoint.every_minutes", "checkpoint.interval", "checkpoint.mtbf_hours")
def intervals(recipe: Recipe) -> Findings:
    saves = recipe.checkpoint
    if saves.every_minutes == 0.0:
        yield "checkpoint.every_minutes", "would save without end", "checkpoint.every_minutes=null for never"
    if saves.interval is not None and not saves.mtbf_hours:
        message = "needs checkpoint.mtbf_hours: how often the run fails says how often it should save"
        fix = "checkpoint.mtbf_hours=8, say (jobs of 1,024 GPUs: arXiv 2410.21680); or checkpoint.interval=null"
        yield "checkpoint.interval", message, fix
    elif saves.interval is None and saves.mtbf_hours is not None:
        message = "nobody asks for it: checkpoint.interval=null"
        yield "checkpoint.mtbf_hours", message, "checkpoint.interval=young_daly; or leave it out"


@rule(*COUNTED, *DEGREES, "checkpoint.neighbor_copies", "checkpoint.neighbor_every_steps")
def neighbors(recipe: Recipe) -> Findings:
    key, other = "checkpoint.neighbor_copies", "checkpoint.neighbor_every_steps"
    saves, nodes = recipe.checkpoint, count_nodes(recipe)
    copies, every = saves.neighbor_copies, saves.neighbor_every_steps
    if copies >= nodes and copies:
        there = "is" if nodes == 2 else "are"
        fix = f"{key}={nodes - 1}" if nodes > 1 else f"{key}=0; or launch=slurm with launch.nodes=2 or more"
        yield key, f"a copy lies on a node of its own, and beside a rank's there {there} {nodes - 1}", fix
    elif copies and every is None:
        yield key, f"nothing says how often: {other}=null", f"{other}=10, say; or {key}=0"
    elif every is not None and not copies:
        yield other, f"nobody holds a copy: {key}=0", f"{key}=1; or leave it out"


@rule("train.on_spike", "checkpoint.every_steps", "checkpoint.every_minutes", "checkpoint.interval")
def rewinds(recipe: Recipe) -> Findings:
    saves = recipe.checkpoint
    if recipe.train.on_spike == "rewind" and not (saves.every_steps or saves.every_minutes or saves.interval):
        message = "a rewind goes back to a checkpoint, and none is saved before the end"
        yield "train.on_spike", message, "checkpoint.every_steps=100; or train.on_spike=skip"


@rule("checkpoint.keep_best", "train.validate_every_steps", "eval.tasks", "pipeline.fill_bubbles")
def best(recipe: Recipe) -> Findings:
    key, by = "checkpoint.keep_best", recipe.checkpoint.keep_best
    if isinstance(by, str) and not recipe.eval.tasks:
        yield key, "nothing has that score: eval.tasks=[]", f"eval.tasks=[FOLDER]; or {key}=true"
    elif by is True and recipe.train.validate_every_steps is None:
        message = "nothing says which is the best: train.validate_every_steps=null"
        yield key, message, f"{key}=false; or train.validate_every_steps=100"
    elif by and recipe.pipeline.fill_bubbles != "none":
        message = "a validation in bubbles ends a step late, when its weights are no more"
        yield key, message, f"{key}=false; or pipeline.fill_bubbles=none"


@rule("eval.average", "train.ema")
def average(recipe: Recipe) -> Findings:
    if recipe.eval.average and recipe.train.ema is None:
        message = "there is no average of the weights to score: train.ema=null"
        yield "eval.average", message, "train.ema=0.999; or eval.average=false"


def find_run_root_problems(recipe: Recipe) -> Iterator[Problem]:
    """The rule of run.root, by its text alone."""
    root = recipe.run.root
    if not root.strip():
        yield refuse(recipe, "run.root", "names no folder", "run.root=runs")
    elif "::" in root or re.match(r"[a-z][a-z0-9]*:/", root):
        message = "is no folder: a run keeps its lock, lease and logs on a file system"
        fix = f"run.root=runs checkpoint.root={root}, which keeps the checkpoints there"
        yield refuse(recipe, "run.root", message, "a path without file://" if root.startswith("file:") else fix)


@rule("checkpoint.root")
def checkpoint_root(recipe: Recipe) -> Findings:
    """A folder or a URL, by its text alone: whether a store answers is asked before a run begins."""
    key, root = "checkpoint.root", recipe.checkpoint.root
    if root is None:
        return
    protocol, is_url, rest = root.partition("://")
    if not root.strip():
        yield key, "names no place", "checkpoint.root=null for RUN/checkpoints"
    elif "::" in root:
        message = "chains protocols: a cache between the run and its store would show a former state"
        yield key, message, f"{key}=s3://bucket/runs, the store itself"
    elif protocol == "memory" and is_url:
        yield key, "is the memory of one process, and goes with it", f"{key}=s3://bucket/runs; or /dev/shm/runs"
    elif (slip := re.match(r"([a-z][a-z0-9]+):/(?!/)", root)) is not None:
        yield key, "would be a folder of that name here", f"{key}={slip[1]}://{root[slip.end() :]}"
    elif is_url and not rest.strip("/"):
        yield key, "names no bucket or folder", f"{key}={protocol}://bucket/runs"
    elif is_url:
        from fsspec import available_protocols, registry  # for those who name one

        if protocol not in (known := [*available_protocols(), *registry]):
            near = nearest(protocol, known) or ["s3", "gs", "abfs"]
            yield key, f"fsspec knows no protocol {protocol}", ", ".join(f"{each}://..." for each in near)


# --- names, tracking and texts


@rule("run")
def names(recipe: Recipe) -> Findings:
    for key, value in (("run.id", recipe.run.id), ("run.name", recipe.run.name)):
        if value is not None and not _RUN_ID.fullmatch(value):
            message = "names a folder and a wandb run: letters, digits, . _ - only, 64 at most, none of . _ - first"
            cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", value).strip("._-")[:64]
            yield Problem(key, value, message, f"{key}={cleaned}" if cleaned else "")


@rule(*COUNTED, *DEGREES, "track.profile_steps", "track.profile_ranks")
def profile(recipe: Recipe) -> Findings:
    steps, ranks, world = recipe.track.profile_steps, recipe.track.profile_ranks, count_ranks(recipe)
    if steps is None:
        return
    if steps[0] > steps[1]:
        fix = f"track.profile_steps=[{steps[1]},{steps[0]}]"
        yield "track.profile_steps", "the first step comes after the last", fix
    if not ranks or any(rank >= world for rank in ranks):
        message = f"of {world} ranks, which have the numbers 0 to {world - 1}, these record nothing"
        yield "track.profile_ranks", message, "track.profile_ranks=[0]"


@rule("track.timeline_step", "train.steps")
def timeline(recipe: Recipe) -> Findings:
    step, steps = recipe.track.timeline_step, recipe.train.steps
    if step is not None and step > steps and recipe.train.epochs is None:
        message = f"no such step is trained: train.steps={steps}"
        yield "track.timeline_step", message, f"track.timeline_step={min(5, steps)}; or null"


@rule("track.tensorboard", "track.mlflow", "track.wandb", "track.csv", "track.html")
def trackers(recipe: Recipe) -> Findings:
    packages = {"csv": (), "html": ("altair", "vl_convert")}
    for name in recipe.track.trackers:
        for package in (each for each in packages.get(name, (name,)) if find_spec(each) is None):
            key = f"track.{'mlflow.uri' if name == 'mlflow' else 'wandb.mode' if name == 'wandb' else name}"
            wanted = "'meshwright[page]'" if name == "html" else name
            message, fix = f"the package {package} is not installed", f"`pip install {wanted}`; or leave it out"
            yield key, message, fix
    if is_secret("", recipe.track.mlflow.uri):
        message = "has a password, which RUN/recipe.yaml and MLflow's artifacts would keep for all to read"
        fix = "leave it out, and export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        yield Problem("track.mlflow.uri", None, message, fix)


@rule("track.wandb")
def wandb(recipe: Recipe) -> Findings:
    wandb = recipe.track.wandb
    yield from _project(recipe, wandb.project)
    for key, name in (("track.wandb.entity", wandb.entity), ("track.wandb.group", wandb.group)):
        if name is not None and (not name.strip() or len(name) > PROJECT_CHARACTERS):
            yield key, f"names nothing: 1 to {PROJECT_CHARACTERS} characters", f"leave it out ({key}=null)"
    if wandb.entity is not None and "/" in wandb.entity:
        entity, _, project = wandb.entity.partition("/")
        yield "track.wandb.entity", "is a user or a team alone", _write(entity, project)
    for tag in wandb.tags:
        if not 0 < len(tag) <= TAG_CHARACTERS:
            message = f"wandb takes tags of 1 to {TAG_CHARACTERS} characters, and one has {len(tag)}: {tag[:20]!r}"
            yield "track.wandb.tags", message, "shorten it, or leave it out"


def _project(recipe: Recipe, project: str) -> Findings:
    key, (entity, _, rest) = "track.wandb.project", project.partition("/")
    if not project.strip():
        yield key, "names no project", f"{key}=meshwright"
    elif len(project) > PROJECT_CHARACTERS:
        yield key, f"wandb takes at most {PROJECT_CHARACTERS} characters, and it has {len(project)}", "shorten it"
    elif found := [character for character in NOT_IN_PROJECTS if character in project]:
        is_path = found == ["/"] and entity and rest and "/" not in rest
        message = f"wandb takes none of {' '.join(NOT_IN_PROJECTS)} in a project's name"
        cleaned = "".join("-" if character in NOT_IN_PROJECTS else character for character in project)
        yield key, message, _write(entity, rest) if is_path else f"{key}={cleaned}"


def _write(entity: str, project: str) -> str:
    return f"track.wandb.entity={entity}" + (f" track.wandb.project={project}" if project else "")


@rule()
def texts(recipe: Recipe) -> Findings:
    """Texts that look like secrets, which recipe.yaml would keep, or have control characters, which a terminal obeys and which
    break a line of a log or of a job's script in two. Variables of the ranks may have any but NUL."""
    for key, value in flatten(asdict(recipe)).items():
        texts = [key, *_texts_in(value)]
        if not key.startswith(OWN_SECRETS) and any(map(looks_secret, texts)):
            message = "looks like a secret, and the run's recipe.yaml would keep it for all to read"
            fix = "give it to the ranks by its variable, such as 'launch.environment.HF_TOKEN=${oc.env:HF_TOKEN}'"
            yield Problem(key, None, message, fix)
        # Nothing that becomes a part of a line of a job's script needs a tab.
        breaks = "\r" if key in MAY_HAVE_LINES else "\r\n\t" if key.startswith("launch.") else "\r\n"
        found = next((text for text in texts if CONTROLS.search(text) or not set(breaks).isdisjoint(text)), None)
        if found is not None and not key.startswith("launch.environment"):
            message = f"has control characters: {hide_secrets(in_a_line(found))[:80]}"
            yield Problem(in_a_line(key), None, message, "leave them out")


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, element in value.items():
            yield from (str(name), *_texts_in(element))
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _texts_in(element)


RUN_RULES = (
    *(family, *METHOD_RULES, sources, blend, imported_sources, conversations, streams, token_stores),
    *(tokenizer, vocabulary, weights, validation),
    Rule(("run.root",), find_run_root_problems),
    *(intervals, checkpoint_root, neighbors, rewinds, profile, timeline, best, average, names, trackers, wandb, texts),
)
