"""Whole files of other systems as recipes: `meshwright check --from FILE`.

The table of `foreign.yaml` translates names and values one by one, and has the forms of files with their systems' defaults, which
are written out where a file leaves a value out. Code here settles what follows from several values together: the batch of a step,
betas, the schedule, the length, shards, the model.
"""

import json
import re
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from omegaconf._utils import get_yaml_loader

from framework.errors import EXIT_DONE, RecipeError
from framework.recipe.compose import compose
from framework.recipe.convert import MANDATORY
from framework.recipe.keys import flatten, nest
from framework.recipe.problem import Problem, render_problems, show
from framework.recipe.suggest import FORMS, STAGES, Foreign, names_of, normalize, read_table, suffixes


@dataclass
class Reading:
    """A file while it is read."""

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

    def take(self, name: str, default: Any = None) -> Any:
        """Remove a name, with any section before it, and return its value."""
        found = next((each for each in self.values if each == name or each.endswith(f".{name}")), None)
        value = default if found is None else self.values.pop(found)
        return default if value is None else value

    def number(self, name: str, default: float = 0) -> Any:
        """Remove a name whose value must be a number, and return it. RecipeError where it is none."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RecipeError(f"--from: {name}={show(value)} is no number: write one in the file")
        return value

    def set_batch(self, each: int, accumulation: int, dp: int) -> None:
        """Sequences of a microbatch, and of a step."""
        self.settings["batch.sequences_per_microbatch"] = each
        self.settings["batch.sequences_per_step"] = each * accumulation * dp

    def set_betas(self, first: str, second: str) -> None:
        """Both betas in one list."""
        self.settings["optim.betas"] = [self.number(first, 0.9), self.number(second, 0.999)]

    def set_schedule(self, name: str, warmup: int, final_ratio: float, decay_steps: int | None = None) -> None:
        """Shape of the learning rate."""
        self.groups["optim/schedule"] = name
        self.settings |= {"optim.schedule.warmup_steps": warmup, "optim.schedule.final_ratio": final_ratio}
        if decay_steps is not None:
            self.settings["optim.schedule.decay_steps"] = decay_steps

    def set_path(self, path: Any) -> None:
        """Path of the text."""
        self.groups["data"] = "files"
        self.settings["data.sources.files.path"] = path


@dataclass(frozen=True)
class Form:
    """A kind of file, as `foreign.yaml` describes it."""

    name: str
    # Systems whose names it has, its own first.
    systems: Sequence[str]
    # Names, or sections, of which it has at least one.
    marks: Sequence[str]
    has_sections: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # Recipes of ours, by the system's name of a model.
    models: Mapping[str, str] = field(default_factory=dict)


def convert_command(file: Path, overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> int:
    """Print the file's recipe as an experiment, with the values that it leaves out. RecipeError where that recipe cannot be
    run."""
    form, reading = read_file(file, count_ranks_asked(overrides))
    problems = check_experiment(render(file, form, reading), overrides, recipe_dirs)
    missing = [problem for problem in problems if problem.missing or problem.value == MANDATORY]
    reading.absent += [f"to be given: {problem.key}=..." for problem in missing]
    print(render(file, form, reading))
    wrong = [problem for problem in problems if problem not in missing]
    if wrong:
        raise RecipeError(f"the recipe of {file} needs changes:\n{render_problems(wrong)}")
    return EXIT_DONE


def check_experiment(text: str, overrides: Sequence[str], recipe_dirs: Sequence[Path]) -> list[Problem]:
    """Problems of an experiment's file together with the overrides."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "experiment").mkdir()
        (Path(folder) / "experiment" / "converted.yaml").write_text(text, encoding="utf-8")
        return compose(["experiment=converted", *overrides], [Path(folder), *recipe_dirs]).problems


def count_ranks_asked(overrides: Sequence[str]) -> int:
    """Ranks that the command line states: few files of other systems do."""
    asked = [text.partition("=")[2] for text in overrides if text.startswith("launch.ranks=")]
    return int(asked[-1]) if asked and asked[-1].isdecimal() else 1


def read_file(file: Path, ranks: int) -> tuple[Form, Reading]:
    """The form of a file, and its values in our keys. RecipeError for a file of no known form."""
    tree = _load(file)
    values = {normalize(name): value for name, value in flatten(tree).items()}
    form = find_form(file, tree)
    names = {suffix for name in values for suffix in suffixes(name)}
    absent = {name: value for name, value in form.defaults.items() if name not in names}
    reading = Reading(values | absent, ranks)
    SETTLERS[form.name](reading)
    for name, value in reading.values.items():
        _translate(reading, form, name, value, is_default=name in absent)
    _complete(file, reading)
    return form, reading


def _complete(file: Path, reading: Reading) -> None:
    """Complete the run's name, and note what the file lacks and what two of its values cannot be together here."""
    settings = reading.settings
    settings.setdefault("run.name", re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).strip("._-")[:64] or "run")
    if "model" not in reading.groups and not settings.keys() & {"model.weights", "model.family"}:
        reading.absent.append("the file names no model: model.weights=FOLDER, model=... or model.config_file=FILE")
    if "batch.context" not in settings:
        reading.absent.append("the file names no length of sequences: batch.context=...")
    if settings.get("memory.compile") == "always" and settings.get("memory.activation_checkpointing") == "selective":
        del settings["memory.compile"]  # auto: compiled but where graphs end and could not choose what is kept


def list_forms() -> list[Form]:
    """Forms of the table, those with more particular marks first."""
    return [Form(name, **entry) for name, entry in read_table()[FORMS].items()]


def find_form(file: Path, tree: Mapping[str, Any]) -> Form:
    """The form whose marks a file has."""
    sections = {normalize(name) for name, value in tree.items() if isinstance(value, dict)}
    names = {normalize(name) for name in tree} - sections
    forms = list_forms()
    for form in forms:
        if (sections if form.has_sections else names) & set(form.marks):
            return form
    known = ", ".join(f"{form.name} ({' or '.join(form.marks[:3])})" for form in forms)
    raise RecipeError(f"--from {file}: no form that is known: a file has one of the names in brackets: {known}")


def render(file: Path, form: Form, reading: Reading) -> str:
    """An experiment's file; values without a counterpart, and those that mean something else, are comments."""
    lines = ["# @package _global_", f"# {form.name}'s {file.name}, as `meshwright check --from` reads it."]
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


def _translate(reading: Reading, form: Form, name: str, value: Any, is_default: bool) -> None:
    """Enter one value: into the settings, or a line on why it is not there."""
    if value is None or value in ([], {}, ""):
        return
    line = f"{name}: {show(value)}"
    found = _find(form, name)
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


def _find(form: Form, name: str) -> Foreign | None:
    for suffix in suffixes(name):
        for system in form.systems:
            if suffix in names_of(system):
                return names_of(system)[suffix]
    return None


# --- what follows from several values


def _settle_trainer(reading: Reading) -> None:
    """Settle Hugging Face's TrainingArguments."""
    _settle_hugging_face(reading, "num_train_epochs", "per_device_train_batch_size", "lr_scheduler_type")


def _settle_hugging_face(reading: Reading, epochs: str, microbatch: str, schedule: str) -> None:
    """Settle the names of Hugging Face's Trainer; arguments are names that differ between systems."""
    _set_length(reading, reading.number("max_steps", -1), reading.number(epochs))
    inner = ("sequence_parallel_degree", "context_parallel_size", "tensor_parallel_size")
    dp = max(1, reading.ranks // prod(reading.values.get(name) or 1 for name in inner))
    reading.set_batch(reading.number(microbatch), reading.number("gradient_accumulation_steps", 1), dp)
    reading.differs.append(_say_ranks("gradient_accumulation_steps", reading))
    _set_trainer_schedule(reading, reading.take(schedule))
    reading.set_betas("adam_beta1", "adam_beta2")
    _set_shards_by_name(reading)


def _settle_axolotl(reading: Reading) -> None:
    _settle_hugging_face(reading, "num_epochs", "micro_batch_size", "lr_scheduler")
    sources = reading.take("pretraining_dataset") or reading.take("datasets", [])
    for each in sources if isinstance(sources, list) else [{"path": sources}]:
        source = each if isinstance(each, dict) else {"path": each}
        if "data.sources.files.path" in reading.settings:
            reading.absent.append(f"dataset {source.get('path')}: a further source: data.sources.NAME.path")
            continue
        reading.set_path(source.get("path"))
        if "field" in source or "text_column" in source:
            reading.settings["data.sources.files.field"] = source.get("field") or source.get("text_column")
        if (kind := str(source.get("type", "completion"))) not in ("completion", "pretrain"):
            words = "chat formats are not in this version: it trains on plain text, data.sources.NAME.field of a record"
            reading.absent.append(f"datasets.type: {kind}: {words}")
    _refuse_counts(reading, "val_set_size")


def _settle_llama_factory(reading: Reading) -> None:
    _settle_trainer(reading)
    name = reading.take("dataset")
    if name is not None:
        reading.groups["data"] = "files"
        words = "a name of dataset_info.json there; give its file: data.sources.files.path"
        reading.absent.append(f"dataset: {show(name)}: {words}")
    _refuse_counts(reading, "val_size")


def _settle_torchtitan(reading: Reading) -> None:
    take, number = reading.take, reading.number
    tp, pp, cp = (number(f"{name}_parallel_degree", 1) or 1 for name in ("tensor", "pipeline", "context"))
    reading.settings |= {"parallel.tp": tp, "parallel.pp": pp, "parallel.cp": cp}
    shard, replicas = number("data_parallel_shard_degree"), number("data_parallel_replicate_degree", 1) or 1
    if shard > 0:  # the file states the number of ranks
        reading.ranks = tp * pp * cp * shard * replicas
        reading.settings["launch.ranks"] = reading.ranks
        reading.settings["zero.shard_within"] = shard * cp if replicas > 1 else None
    elif replicas > 1:
        reading.settings["zero.shard_within"] = max(1, reading.ranks // (tp * pp * replicas))
    reading.settings["zero.stage"] = 3 if shard != 1 or cp > 1 else 0
    dp = max(1, reading.ranks // (tp * pp * cp))
    local, whole = number("local_batch_size"), number("training.global_batch_size", -1)
    microbatch = number("pipeline_parallel_microbatch_size", 1) if pp > 1 else local
    reading.settings["batch.sequences_per_microbatch"] = microbatch
    reading.settings["batch.sequences_per_step"] = whole if whole > 0 else local * dp
    if whole <= 0 and shard <= 0:
        reading.differs.append(_say_ranks("local_batch_size", reading))
    steps, warmup = number("steps"), number("warmup_steps")
    reading.settings["train.steps"] = steps
    _set_torchtitan_schedule(reading, steps, warmup)
    reading.set_betas("beta1", "beta2")
    model, shipped = f"{take('model.name')} {take('model.flavor')}", read_table()[FORMS]["torchtitan"]["models"]
    if model in shipped:
        reading.groups["model"] = shipped[model]
    else:
        reading.absent.append(f"model {model}: no recipe of this name: model=..., or model.family and model.config")
    if "dataset_path" in {each.rpartition(".")[2] for each in reading.values} or take("dataset") is not None:
        reading.set_path(take("dataset_path", "???"))


def _set_torchtitan_schedule(reading: Reading, steps: int, warmup: int) -> None:
    kind, ratio, final = reading.take("decay_type"), reading.number("decay_ratio", 1.0), reading.number("min_lr_factor")
    name, decay = {"linear": "linear", "cosine": "cosine"}.get(kind), None
    if ratio < 1:
        name, decay = "wsd", round(ratio * steps)
        if kind != "linear":
            reading.differs.append(f"decay_type: {kind} with decay_ratio: {ratio}: wsd decays linearly")
    if name is None:
        reading.absent.append(f"decay_type: {kind}: optim.schedule.name is constant, linear, cosine or wsd")
        name = "linear"
    reading.set_schedule(name, warmup, final, decay)


def _settle_nanotron(reading: Reading) -> None:
    take, number = reading.take, reading.number
    dp, tp, pp = number("parallelism.dp", 1), number("parallelism.tp", 1), number("parallelism.pp", 1)
    cp = number("context_parallel_size", 1)
    reading.ranks = dp * tp * pp * cp
    reading.settings |= {"parallel.tp": tp, "parallel.pp": pp, "parallel.cp": cp, "launch.ranks": reading.ranks}
    reading.set_batch(number("tokens.micro_batch_size", 1), number("batch_accumulation_per_replica", 1), dp)
    steps, warmup = number("tokens.train_steps", 1000), number("lr_warmup_steps", 0)
    lr = number("learning_rate_scheduler.learning_rate", 3e-4)
    reading.settings |= {"train.steps": steps, "optim.lr": lr}
    shape, final = take("lr_decay_style", "linear"), number("min_decay_lr", 0.0) / (lr or 1.0)
    decay, start = number("lr_decay_steps"), number("lr_decay_starting_step")
    if start > warmup:
        reading.set_schedule("wsd", warmup, final, decay or steps - start)
        if shape != "linear":
            reading.differs.append(f"lr_decay_style: {shape} from step {start} on: wsd decays linearly")
    elif shape in ("linear", "cosine"):
        reading.set_schedule(shape, warmup, final)
        if decay and warmup + decay != steps:
            reading.differs.append(f"lr_decay_steps: {decay}: the decay ends with train.steps={steps}")
    else:
        reading.absent.append(f"lr_decay_style: {shape}: optim.schedule.name is constant, linear, cosine or wsd")
    reading.set_betas("adam_beta1", "adam_beta2")
    _set_nanotron_model(reading)
    stages = take("data_stages", [])
    stages = [stage for stage in stages if isinstance(stage, dict)] if isinstance(stages, list) else []
    datasets = [(stage.get("data") or {}).get("dataset") or {} for stage in stages]
    if datasets:
        reading.set_path(datasets[0].get("hf_dataset_or_datasets", "???"))
        if "text_column_name" in datasets[0]:
            reading.settings["data.sources.files.field"] = datasets[0]["text_column_name"]
    for stage in stages[1:]:
        reading.absent.append(f"data_stages: {stage.get('name')}: the blend of sources is one for the whole run")


def _set_nanotron_model(reading: Reading) -> None:
    """Set the values of model_config, which are those of Hugging Face's Llama."""
    prefix = "model.model_config."
    own = ("is_llama_config", "is_qwen2_config", "rope_interleaved", "use_cache", "pretraining_tp")
    reading.settings["model.family"] = "llama"
    for name in [each for each in reading.values if each.startswith(prefix)]:
        value, key = reading.values.pop(name), name.removeprefix(prefix)
        if key == "rope_theta":
            reading.settings["model.config.rope_parameters.rope_theta"] = float(value)
            reading.settings["model.config.rope_parameters.rope_type"] = "default"
        elif key not in own and not key.startswith("rope_") and value is not None and not key.startswith("_"):
            reading.settings[f"model.config.{key}"] = value


def _set_length(reading: Reading, steps: int, epochs: float | None) -> None:
    """Set the steps of the run, or epochs; and the warm-up, which others state as a share of it."""
    ratio, warmup = reading.number("warmup_ratio", 0.0), reading.number("warmup_steps", 0)
    if steps > 0:
        reading.settings["train.steps"] = steps
        warmup = warmup or round(ratio * steps)
    else:
        reading.settings["train.epochs"] = epochs
        if ratio and not warmup:
            words = "optim.schedule.warmup_steps, in steps: how many the epochs have is known once the data is prepared"
            reading.absent.append(f"warmup_ratio: {ratio}: {words}")
    reading.settings["optim.schedule.warmup_steps"] = int(warmup)


def _say_ranks(name: str, reading: Reading) -> str:
    return (
        f"{name}: the file does not say how many ranks there are, and a batch grows with them there: batch.sequences_per_step is"
        f" that of {reading.ranks} data-parallel rank{'s' * (reading.ranks != 1)}; for N ranks: check --from FILE launch.ranks=N"
    )


def _set_trainer_schedule(reading: Reading, name: str) -> None:
    """Set the schedule. Hugging Face's decay to 0, unless they have a least rate."""
    ours = names_of("HF Trainer")["lr_scheduler_type"].values.get(str(name).lower())
    given = [each for each in reading.values if each.startswith("lr_scheduler_kwargs.")]
    more = {each.rpartition(".")[2]: reading.number(each) for each in given}
    lr = reading.settings["optim.lr"] = reading.number("learning_rate", 5e-5)
    final = more.get("min_lr_rate") or more.get("min_lr", 0.0) / (lr or 1.0)
    if ours is None:
        reading.absent.append(f"schedule: {name}: optim.schedule.name is constant, linear, cosine or wsd")
        return
    warmup = reading.settings["optim.schedule.warmup_steps"]
    if name == "constant" and warmup:
        words = "constant has no warm-up there, and ours has: optim.schedule.warmup_steps=0"
        reading.differs.append(f"lr_scheduler: {words}")
        warmup = 0
    reading.set_schedule(ours, warmup, final if ours != "constant" else 0.0, more.get("num_decay_steps"))


def _set_shards_by_name(reading: Reading) -> None:
    """Set ZeRO's stage by the name of a DeepSpeed file, or of an FSDP strategy."""
    stages = read_table()[STAGES]
    for name in [each for each in reading.values if each.partition(".")[0] in ("deepspeed", "fsdp")]:
        value = reading.values.pop(name)
        if value in (None, "", [], False):
            continue
        text = " ".join(value) if isinstance(value, list) else str(value)
        stage = next((stages[word] for word in stages if word in text), None)
        if name.endswith("zero_optimization.stage"):
            stage = value
        if stage is not None:
            reading.settings.setdefault("zero.stage", stage)
            if "hybrid_shard" in text:
                reading.settings["zero.shard_within"] = "node"
        else:
            reading.absent.append(f"{name}: {show(value)}: zero.stage, as zero_optimization.stage of that file says")


def _refuse_counts(reading: Reading, name: str) -> None:
    """Set the share of held-out data, which may be a number of records elsewhere."""
    held = reading.number(name, 0.0)
    if held > 0.5:
        reading.absent.append(f"{name}: {held}: data.validation is a share of documents from 0 to 0.5")
    else:
        reading.settings["data.validation"] = float(held)


SETTLERS: Mapping[str, Callable[[Reading], None]] = MappingProxyType(
    {
        "nanotron": _settle_nanotron,
        "torchtitan": _settle_torchtitan,
        "axolotl": _settle_axolotl,
        "LLaMA-Factory": _settle_llama_factory,
        "HF TrainingArguments": _settle_trainer,
    }
)
