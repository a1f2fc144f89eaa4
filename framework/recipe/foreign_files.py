"""Whole files of other systems as recipes: `meshwright check --from FILE`.

The table of `foreign.yaml` translates names and values one by one, and has the forms of files with their systems' defaults, which
are written out where a file leaves a value out. Each form gives some of its names roles, and code here settles what follows from
several roles together, alike for all systems: the batch of a step, the length, the schedule, shards, the model, the data.
"""

import json
import re
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from framework.errors import EXIT_DONE, RecipeError
from framework.recipe.compose import compose
from framework.recipe.convert import MANDATORY
from framework.recipe.keys import FORMS, STAGES, flatten, names_of, nest, normalize, read_table, suffixes
from framework.recipe.problem import render_problems, show

# Forms of conversations, with the field that has them where a file names none.
CHATS = MappingProxyType({"chat_template": "messages", "sharegpt": "conversations", "alpaca": "instruction"})


@dataclass(frozen=True)
class Form:
    """A kind of file, as `foreign.yaml` describes it."""

    name: str
    # Systems whose names it has, its own first.
    systems: Sequence[str]
    # Names, or sections, of which it has at least one.
    marks: Sequence[str]
    has_sections: bool = False
    # Names, by what the values mean in every system, from which our values follow together.
    roles: Mapping[str, Any] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Recipes of ours, by the system's name of a model.
    models: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Reading:
    """A file while it is read."""

    form: Form
    # Values that are not settled yet, by dotted names.
    values: dict[str, Any]
    ranks: int
    # Values of our keys.
    settings: dict[str, Any] = field(default_factory=dict)
    # Recipes that it chooses, by group.
    groups: dict[str, str] = field(default_factory=dict)
    # Lines on values without a counterpart, and on those whose counterpart means something else.
    absent: list[str] = field(default_factory=list)
    differs: list[str] = field(default_factory=list)

    def take(self, role: str, default: Any = None) -> Any:
        """Remove the value of a role, whatever section it stands in, and return it."""
        own = self.form.roles.get(role) or []
        names = [own] if isinstance(own, str) else own
        found = [each for name in names for each in self.values if f".{each}".endswith(f".{name}")]
        value = self.values.pop(found[0]) if found else None
        return default if value is None else value

    def number(self, role: str, default: float = 0) -> Any:
        """Remove the value of a role, which must be a number, and return it. RecipeError where it is none."""
        value = self.take(role, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RecipeError(f"--from: {self.form.roles[role]}={show(value)} is no number: write one in the file")
        return value


def convert_command(file: Path, overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> int:
    """Print the file's recipe as an experiment, with the values that it leaves out. RecipeError where that recipe cannot be
    run."""
    # Few files of other systems state the ranks.
    asked = [text.partition("=")[2] for text in overrides if text.startswith("launch.ranks=")]
    reading = read_file(file, int(asked[-1]) if asked and asked[-1].isdecimal() else 1)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "experiment").mkdir()
        (Path(folder) / "experiment" / "converted.yaml").write_text(render(file, reading), encoding="utf-8")
        problems = compose(["experiment=converted", *overrides], [Path(folder), *recipe_dirs]).problems
    missing = [problem for problem in problems if problem.missing or problem.value == MANDATORY]
    reading.absent += [f"to be given: {problem.key}=..." for problem in missing]
    print(render(file, reading))
    wrong = [problem for problem in problems if problem not in missing]
    if wrong:
        raise RecipeError(f"the recipe of {file} needs changes:\n{render_problems(wrong)}")
    return EXIT_DONE


def read_file(file: Path, ranks: int) -> Reading:
    """A file's values in our keys. RecipeError for a file of no known form."""
    tree = _load(file)
    values = {normalize(name): value for name, value in flatten(tree).items()}
    form = find_form(file, tree)
    names = {suffix for name in values for suffix in suffixes(name)}
    absent = {name: value for name, value in form.defaults.items() if name not in names}
    reading = Reading(form, values | absent, ranks)
    _settle(reading)
    for name, value in reading.values.items():
        _translate(reading, name, value, is_default=name in absent)
    _complete(file, reading)
    return reading


def _complete(file: Path, reading: Reading) -> None:
    """Complete the run's name, and note what the file lacks and what two of its values cannot be together here."""
    settings = reading.settings
    if any(key.startswith("data.sources.files.") for key in settings):
        reading.groups["data"] = "files"
    settings.setdefault("run.name", re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("._-")[:64] or "run")
    if "model" not in reading.groups and not settings.keys() & {"model.weights", "model.family"}:
        reading.absent.append("the file names no model: model.weights=FOLDER, model=... or model.config_file=FILE")
    if "batch.context" not in settings:
        reading.absent.append("the file names no length of sequences: batch.context=...")
    if settings.get("memory.compile") == "always" and settings.get("memory.activation_checkpointing") == "selective":
        del settings["memory.compile"]  # auto: compiled but where graphs end and could not choose what is kept


def find_form(file: Path, tree: Mapping[str, Any]) -> Form:
    """The form whose marks a file has."""
    sections = {normalize(name) for name, value in tree.items() if isinstance(value, dict)}
    names = {normalize(name) for name in tree} - sections
    forms = [Form(name, **entry) for name, entry in read_table()[FORMS].items()]
    for form in forms:
        if (sections if form.has_sections else names) & set(form.marks):
            return form
    known = ", ".join(f"{form.name} ({' or '.join(form.marks[:3])})" for form in forms)
    raise RecipeError(f"--from {file}: no form that is known: a file has one of the names in brackets: {known}")


def render(file: Path, reading: Reading) -> str:
    """An experiment's file; values without a counterpart, and those that mean something else, are comments."""
    lines = ["# @package _global_", f"# {reading.form.name}'s {file.name}, as `meshwright check --from` reads it."]
    if reading.groups:
        chosen = [f"  - override /{group}: {name}" for group, name in sorted(reading.groups.items())]
        lines += ["defaults:", *chosen, ""]
    tree = nest(dict(sorted(reading.settings.items())))
    lines.append(yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).rstrip())
    for title, found in (("No counterpart", reading.absent), ("Other meaning", reading.differs)):
        if found:
            lines += ["", f"# {title}:", *(f"#   {' '.join(line.split())}" for line in found)]
    return "\n".join(lines)


def _load(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".toml":
            tree = tomllib.loads(text)
        else:
            tree = json.loads(text) if file.suffix == ".json" else yaml.load(text, Loader=get_yaml_loader())
    except OSError as error:
        raise RecipeError(f"--from {file}: {error.strerror}") from error
    except (ValueError, yaml.YAMLError) as error:
        raise RecipeError(f"--from {file}: cannot be read as {file.suffix or 'YAML'}: {error}") from error
    if not isinstance(tree, dict):
        raise RecipeError(f"--from {file}: no names with values in it")
    return tree


def _translate(reading: Reading, name: str, value: Any, is_default: bool) -> None:
    """Enter one value: into the settings, or a line on why it is not there."""
    if value is None or value in ([], {}, ""):
        return
    line = f"{name}: {show(value)}"
    tables = [names_of(system) for system in reading.form.systems]
    found = next((table[suffix] for suffix in suffixes(name) for table in tables if suffix in table), None)
    if found is None:
        if not is_default:
            reading.absent.append(f"{line}: no key of ours has this name's meaning")
        return
    settings = found.settings(value)
    if settings is None:
        if value is not False and not is_default:  # what is off elsewhere is not missed
            reading.absent.append(f"{line}: {found.note or found.key}")
        return
    for key, ours in settings.items():
        if not key.startswith("model.config."):
            key = key.replace(".NAME.", ".files.")
        reading.settings.setdefault(key, ours)
        if found.differs:
            reading.differs.append(f"{line} is {key}={show(ours)}: {found.differs}")


# --- what follows from several values


def _settle(reading: Reading) -> None:
    """Set what follows from several values of a file, by the roles that its form gives their names."""
    inner = {axis: reading.number(axis, 1) or 1 for axis in ("tp", "pp", "cp")}
    reading.settings |= {f"parallel.{axis}": degree for axis, degree in inner.items() if degree != 1}
    _settle_batch(reading, **inner)
    _settle_length(reading)
    _settle_schedule(reading)
    reading.settings["optim.betas"] = [reading.number("beta1", 0.9), reading.number("beta2", 0.999)]
    _settle_shards_by_name(reading)
    _settle_model(reading)
    _settle_data(reading)


def _settle_batch(reading: Reading, tp: int, pp: int, cp: int) -> None:
    """Set ranks, shards and the batch of a step, which grows with the ranks unless the file states it whole."""
    dp, shard, replicas = reading.number("dp"), reading.number("shard"), reading.number("replicas", 1) or 1
    is_stated = dp > 0 or shard > 0
    if is_stated:
        reading.ranks = tp * pp * cp * (dp if dp > 0 else shard * replicas)
        reading.settings["launch.ranks"] = reading.ranks
    if "shard" in reading.form.roles:
        reading.settings["zero.stage"] = 3 if shard != 1 or cp > 1 else 0
        if replicas > 1:
            reading.settings["zero.shard_within"] = max(1, reading.ranks // (tp * pp * replicas))
    each, accumulation = reading.number("microbatch", 1), reading.number("accumulation", 1)
    of_stages, whole = reading.number("microbatch_of_stages"), reading.number("batch", -1)
    reading.settings["batch.sequences_per_microbatch"] = of_stages if pp > 1 and of_stages else each
    if whole > 0:
        reading.settings["batch.sequences_per_step"] = whole
        return
    reading.settings["batch.sequences_per_step"] = each * accumulation * max(1, reading.ranks // (tp * pp * cp))
    if not is_stated:
        reading.differs.append(
            f"{reading.form.roles['microbatch']}: the file does not say how many ranks there are, and a batch grows with them"
            f" there: batch.sequences_per_step is that of {reading.ranks} rank{'s' * (reading.ranks != 1)}; for N ranks:"
            " check --from FILE launch.ranks=N"
        )


def _settle_length(reading: Reading) -> None:
    """Set the steps of the run, or epochs; and the warm-up, which others state as a share of it."""
    steps, epochs = reading.number("steps", -1), reading.number("epochs")
    ratio, warmup = reading.number("warmup_ratio"), reading.number("warmup")
    if steps > 0 or not epochs:
        reading.settings["train.steps"] = steps
        warmup = warmup or round(ratio * steps)
    else:
        reading.settings["train.epochs"] = epochs
        if ratio and not warmup:
            words = "optim.schedule.warmup_steps, in steps: how many the epochs have is known once the data is prepared"
            reading.absent.append(f"warmup_ratio: {ratio}: {words}")
    reading.settings["optim.schedule.warmup_steps"] = int(warmup)


def _settle_schedule(reading: Reading) -> None:
    """Set the shape of the learning rate. A decay that begins late, or takes a part of the steps, is wsd."""
    steps, warmup = reading.settings.get("train.steps", 0), reading.settings["optim.schedule.warmup_steps"]
    lr = reading.settings["optim.lr"] = reading.number("lr")
    shape = str(reading.take("shape")).lower()
    name = names_of("HF Trainer")["lr_scheduler_type"].values.get(shape)
    final = reading.number("final_ratio") or reading.number("final_lr") / (lr or 1.0)
    decay, start, part = reading.number("decay_steps"), reading.number("decay_start"), reading.number("decay_ratio", 1)
    if start > warmup or part < 1:
        name, decay = "wsd", decay or (steps - start if start > warmup else round(part * steps))
        if shape != "linear":
            reading.differs.append(f"schedule: {shape}, which begins late: wsd decays linearly")
    elif decay and name != "wsd" and warmup + decay != steps:
        reading.differs.append(f"decay of {decay} steps: it ends with train.steps={steps}")
    if name is None:
        reading.absent.append(f"schedule: {shape}: optim.schedule.name is constant, linear, cosine or wsd")
        return
    if shape == "constant" and warmup:
        reading.differs.append("schedule: constant has no warm-up there, and ours has: optim.schedule.warmup_steps=0")
        warmup = 0
    reading.groups["optim/schedule"] = name
    final = 0.0 if name == "constant" else final
    reading.settings |= {"optim.schedule.warmup_steps": warmup, "optim.schedule.final_ratio": final}
    if name == "wsd" and decay:
        reading.settings["optim.schedule.decay_steps"] = decay


def _settle_shards_by_name(reading: Reading) -> None:
    """Set ZeRO's stage by the name of a DeepSpeed file, or of an FSDP strategy."""
    stages = read_table()[STAGES]
    for name in [each for each in reading.values if each.partition(".")[0] in ("deepspeed", "fsdp")]:
        value = reading.values.pop(name)
        if value in (None, "", [], False):
            continue
        text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
        stage = next((stages[word] for word in stages if word in text), None)
        if name.endswith("zero_optimization.stage"):
            stage = value
        if stage is not None:
            reading.settings.setdefault("zero.stage", stage)
            if "hybrid_shard" in text:
                reading.settings["zero.shard_within"] = "node"
        else:
            reading.absent.append(f"{name}: {show(value)}: zero.stage, as zero_optimization.stage of that file says")


def _settle_model(reading: Reading) -> None:
    """Set the model by its name and flavor there, or by the values of Hugging Face's Llama."""
    form = reading.form
    if form.models:
        model = f"{reading.take('model')} {reading.take('flavor')}"
        if model in form.models:
            reading.groups["model"] = form.models[model]
        else:
            reading.absent.append(f"model {model}: no recipe of this name: model=..., or model.family and model.config")
    if (section := form.roles.get("llama_config")) is None:
        return
    own = ("is_llama_config", "is_qwen2_config", "use_cache", "pretraining_tp")
    reading.settings["model.family"] = "llama"
    for name in [each for each in reading.values if each.startswith(f"{section}.")]:
        value, key = reading.values.pop(name), name.removeprefix(f"{section}.")
        if key == "rope_theta":
            parameters = {"rope_theta": value, "rope_type": "default"}
            reading.settings |= {f"model.config.rope_parameters.{each}": own for each, own in parameters.items()}
        elif key not in own and not key.startswith(("rope_", "_")) and value is not None:
            reading.settings[f"model.config.{key}"] = value


def _settle_data(reading: Reading) -> None:
    """Set the first source, and the share of held-out data, which may be a number of records elsewhere."""
    held, name, roles = reading.number("held_out"), reading.take("dataset"), reading.form.roles
    if held > 0.5:
        reading.absent.append(f"held-out data: {held}: data.validation is a share of documents from 0 to 0.5")
    elif roles.get("held_out"):
        reading.settings["data.validation"] = float(held)
    sources = reading.take("sources", [])
    for number, each in enumerate(sources if isinstance(sources, list) else [sources]):
        source = flatten(each) if isinstance(each, dict) else {roles["source_path"]: each}
        path, kind = source.get(roles["source_path"], MANDATORY), str(source.get("type", "completion"))
        if number:
            words = "the blend of sources is one for the whole run: data.sources.NAME.path"
            reading.absent.append(f"dataset {source.get('name', path)}: a further source; {words}")
            continue
        reading.settings["data.sources.files.path"] = path
        if (text := source.get(roles["source_field"], source.get("text_column"))) is not None:
            reading.settings["data.sources.files.field"] = text
        if (form := kind.partition(".")[0]) in CHATS:
            reading.settings["data.sources.files.messages"] = source.get("field_messages", CHATS[form])
        elif form not in ("completion", "pretrain"):
            words = "data.sources.NAME.messages is the field of a conversation, data.sources.NAME.field that of text"
            reading.absent.append(f"datasets.type: {kind}: {words}")
    if name is not None and not sources and not any(each.endswith("dataset_path") for each in reading.values):
        reading.settings["data.sources.files.path"] = MANDATORY
        reading.absent.append(
            f"dataset: {show(name)}: a name there (LLaMA-Factory: of dataset_info.json); give its file, or its name on the hub"
        )
