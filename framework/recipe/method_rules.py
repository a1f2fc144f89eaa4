"""Rules of the method: which parameters are trained, beside which adapters, and how they are updated."""

import re
from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType

from framework.recipe.keys import default_of
from framework.recipe.plugins import added_names
from framework.recipe.problem import Findings, Problem, refuse_useless, rule
from framework.recipe.schema import Muon, Recipe


@rule("model.freeze", "optim.groups")
def patterns(recipe: Recipe) -> Findings:
    groups = {f"optim.groups.{name}.pattern": group.pattern for name, group in recipe.optim.groups.items()}
    for key, pattern in (*groups.items(), *(("model.freeze", each) for each in recipe.model.freeze)):
        try:
            re.compile(pattern)
        except re.error as error:
            fix = "escape . [ ( with a backslash where they are meant as such"
            yield Problem(key, pattern, f"not a regular expression: {error}", fix)


@rule("track.noise_scale", "optim.name", "memory.offload.home")
def noise_scale(recipe: Recipe) -> Findings:
    if recipe.track.noise_scale and recipe.optim.name != "adamw":
        yield "track.noise_scale", "it is found in adamw's first moments", "optim.name=adamw"
    if recipe.track.noise_scale and recipe.memory.offload.home == "disk":
        yield "track.noise_scale", "it would read all states from the disk once more", "track.noise_scale=false"


@rule("adapter", "model.freeze", "precision.compute", "memory.compile", "parallel.overlap", "model.router_bias_rate")
def adapter(recipe: Recipe) -> Findings:
    own = recipe.adapter
    if not own.is_used:
        for each in fields(own):
            if each.name != "kind":
                yield from refuse_useless(recipe, f"adapter.{each.name}", "no adapter is trained", "adapter.kind=lora")
        return
    if not own.targets:
        yield "adapter.targets", "an adapter without a place", "adapter.targets=[all-linear]"
    if own.alpha == 0.0 or own.b_lr_ratio == 0.0:
        key = "adapter.alpha" if own.alpha == 0.0 else "adapter.b_lr_ratio"
        yield key, "an adapter that stays without effect", f"{key}={default_of(key)}"
    if recipe.model.freeze:
        yield "model.freeze", "an adapter freezes all of the model but adapter.train", "leave it out (~model.freeze)"
    if recipe.model.router_bias_rate:
        message = "it moves biases of the frozen model, which no adapter's folder has"
        yield "model.router_bias_rate", message, "model.router_bias_rate=0"
    if recipe.precision.compute == "fp8":
        message = "fp8 is of linear layers that are trained, which an adapter freezes"
        yield "precision.compute", message, "precision=bf16; or adapter.base=fp8"
    if own.dropout:
        message = "which elements of its input an adapter drops is not known"
        if own.kind == "dora":
            yield "adapter.dropout", "dora takes all of its input", "adapter.dropout=0; or adapter.kind=lora"
        if recipe.memory.compile == "always":
            yield "memory.compile", f"{message} to a compiled layer", "memory.compile=never; or adapter.dropout=0"
        if recipe.parallel.overlap == "always":
            fix = "parallel.overlap=never; or adapter.dropout=0"
            yield "parallel.overlap", f"{message} where tokens come one rank after another", fix


@rule("loss", "train.z_loss", "adapter", "data.sources", "data.pack", "data.overlong", "data.train_on", "model.weights")
def preferences(recipe: Recipe) -> Findings:
    loss, read = recipe.loss, recipe.data.read
    if not loss.is_paired:
        for name in ("beta", "reference") if loss.name == "next_token" else ("reference",):
            yield from refuse_useless(recipe, f"loss.{name}", f"{loss.name} compares no answers", "loss=dpo")
        for name in (name for name, each in read.items() if each.pairs is not None):
            message = f"data.sources.{name}.pairs are answers to compare, and {loss.name} learns texts"
            yield "loss.name", message, f"loss=dpo; or data.sources.{name}.messages=FIELD in its place"
    if loss.name not in ("simpo", *added_names("loss")):
        yield from refuse_useless(recipe, "loss.margin", f"{loss.name} has no margin", "loss=simpo")
    if recipe.train.z_loss and loss.name != "next_token":
        yield "train.z_loss", f"loss={loss.name} is made of tokens' probabilities alone", "train.z_loss=0"
    if not loss.is_paired:
        return
    for name in (name for name, each in read.items() if each.pairs is None):
        key, field = f"data.sources.{name}.pairs", "completion" if loss.name == "kto" else "chosen"
        message = f"loss={loss.name} compares answers, and this source has none to compare"
        yield Problem(key, None, message, f"{key}={field} in place of its field or messages; or loss=next_token")
    if loss.beta == 0.0:
        yield "loss.beta", "nothing would be learnt: it has to be above 0", "loss.beta=0.1"
    yield from _reference(recipe)
    if recipe.data.packing != "best_fit" and recipe.data.has_conversations:
        message = "both answers of a pair stand in one row, and do not see each other"
        yield "data.pack", message, "leave it out (~data.pack), which is best_fit"
    if recipe.data.overlong == "truncate":
        message = "a pair whose answers are cut compares their beginnings"
        yield "data.overlong", message, "data.overlong=skip or refuse, and a batch.context that holds pairs"
    message = "of pairs both answers have a loss, and nothing else"
    yield from refuse_useless(recipe, "data.train_on", message, "loss=next_token")


def _reference(recipe: Recipe) -> Findings:
    """The rules of loss.reference beside a loss of preferences."""
    loss, key, own = recipe.loss, "loss.reference", recipe.model.weights
    folder = f"{key}={own or 'FOLDER'}"
    if not loss.needs_reference:
        yield from refuse_useless(recipe, key, f"{loss.name} compares with no other model", "loss=dpo")
    elif loss.reference is None:
        fix = (
            f"{key}=base, the frozen model under the adapter"
            if recipe.adapter.is_used
            else f"{folder}; or adapter=lora {key}=base"
        )
        yield key, f"{loss.name} compares with a model that stays as it is", fix
    elif loss.reference == "base" and not recipe.adapter.is_used:
        yield key, "the model is trained whole, so nothing of it stays as it is", f"{folder}; or adapter=lora"
    elif loss.reference == "base" and recipe.adapter.train:
        message = f"adapter.train={recipe.adapter.train} are trained, so they do not stay as they are"
        yield key, message, f"{folder}; or adapter.train=[]"


@rule("optim.schedule", "train.steps", "train.epochs")
def schedule(recipe: Recipe) -> Findings:
    schedule, key = recipe.optim.schedule, "optim.schedule.decay_steps"
    if schedule.name != "wsd":
        message = f"only wsd has a decay of its own, not {schedule.name}"
        yield from refuse_useless(recipe, "optim.schedule.decay_shape", message, "optim/schedule=wsd")
        if schedule.decay_steps is not None:
            yield key, message, f"{key}=null; or optim/schedule=wsd"
    elif schedule.decay_shape == "exponential" and schedule.final_ratio == 0.0:
        message = "an exponential decay never comes to optim.schedule.final_ratio=0"
        yield "optim.schedule.decay_shape", message, "optim.schedule.final_ratio=0.01; or another shape"
    if recipe.train.epochs is not None and schedule.stop_step is None:
        return  # judged when the steps are known: launch/settle.py
    stop_step = recipe.train.steps if schedule.stop_step is None else schedule.stop_step
    steps, warmup, decay = stop_step - schedule.start_step, schedule.warmup_steps, schedule.decay_steps
    run = f"the run of train.steps={steps}" if steps == recipe.train.steps else f"the schedule, of {steps} steps"
    if steps <= 0:
        message = f"the schedule ends with step {stop_step}, before it begins"
        yield "optim.schedule.start_step", message, f"less than {stop_step}"
    elif warmup > steps:
        message = f"the warm-up is longer than {run}"
        yield "optim.schedule.warmup_steps", message, f"at most {steps}; or train.steps={warmup} and more"
    elif schedule.name == "wsd" and decay is not None and steps < warmup + decay:
        message = f"warm-up and decay, {warmup} + {decay} steps, are longer than {run}"
        yield key, message, f"{key}={steps - warmup} or less" if warmup < steps else f"train.steps={warmup + decay}"


# Keys of `optim` that some optimizers have, and which.
OWNED_BY: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"betas": ("adamw", "lion", "muon"), "eps": ("adamw", "muon"), "momentum": ("sgd", "muon")}
    | {f"muon.{each.name}": ("muon",) for each in fields(Muon)}
)


@rule("optim.name", *(f"optim.{name}" for name in OWNED_BY))
def optimizer(recipe: Recipe) -> Findings:
    optim = recipe.optim
    for name, owners in OWNED_BY.items():
        if optim.name not in (*owners, *added_names("optimizer")):
            message = f"{optim.name} has no {name}, so it would do nothing"
            yield from refuse_useless(recipe, f"optim.{name}", message, f"optim={' or optim='.join(owners)}")
    if any(beta >= 1.0 for beta in optim.betas):
        yield "optim.betas", "at 1 a moment never forgets; each must be below 1", "0.9 to 0.999"
    if optim.momentum >= 1.0:
        yield "optim.momentum", "at 1 it never forgets; it must be below 1", "0.9"


@rule(
    *("optim.name", "optim.groups", "adapter.kind", "memory.offload.optimizer", "precision.moments", "precision.master")
)
def muon(recipe: Recipe) -> Findings:
    name, why = recipe.optim.name, "muon needs whole matrices of momentum in fp32 on the device"
    asked = [key for key, each in recipe.optim.groups.items() if each.optimizer != "auto"]
    if name != "muon" and asked:
        message = f"of optim.name=muon only: {name} updates all parameters"
        yield Problem(
            f"optim.groups.{asked[0]}.optimizer",
            recipe.optim.groups[asked[0]].optimizer,
            message,
            "auto; or optim=muon",
        )
    if name == "muon" and recipe.memory.offload.optimizer:
        yield "memory.offload.optimizer", why, "0; or optim=adamw"
    if name == "muon" and recipe.precision.moments != "fp32":
        yield "precision.moments", why, "fp32; or optim=adamw"
    if name == "muon" and recipe.adapter.is_used:
        message = "muon is for whole weights; adapters are thin matrices, which adamw trains"
        yield "adapter.kind", message, "adapter=none; or optim=adamw"
    if name == "muon" and recipe.precision.master == "none":
        message = "muon's updates are many times smaller than weights, which bf16 would round away"
        yield "precision.master", message, "fp32; or optim=adamw"


@rule("precision.moments", "optim.name", "optim.momentum")
def moments(recipe: Recipe) -> Findings:
    key, moments, optim = "precision.moments", recipe.precision.moments, recipe.optim
    if moments != "fp32" and optim.name == "sgd" and optim.momentum == 0.0:
        message = "sgd with optim.momentum=0 has no moments, so it would do nothing"
        yield key, message, f"leave it out (~{key}); or optim.momentum=0.9"
    elif moments != "fp32" and optim.name in added_names("optimizer"):
        message = "how moments of a plugin's optimizer may be rounded is not known"
        yield key, message, f"leave it out (~{key}), which is fp32"
    elif moments == "int8" and optim.name == "lion":
        message = (
            "lion updates by a sign, as far for a small moment as for a large one, and of small ones int8 keeps the least: where"
            " it turns the sign of moment and gradient, an update is wrong by all of its size"
        )
        yield key, message, f"{key}=bf16; or optim=adamw"


@rule(
    *("optim.clip_update", "optim.decay_follows", "optim.schedule", "train.steps", "train.epochs"),
    *("memory.offload.optimizer", "precision.master"),
)
def updates(recipe: Recipe) -> Findings:
    optim, offload = recipe.optim, recipe.memory.offload.optimizer
    if optim.clip_update == 0.0:
        yield "optim.clip_update", "an update clipped to 0 trains nothing", "optim.clip_update=null"
    elif optim.clip_update is not None and (offload or recipe.precision.master == "none"):
        message = (
            "a host updates unit after unit, before ranks know how large the whole update of a parameter is"
            if offload
            else "the update is known only after weights without a master are rounded"
        )
        yield "optim.clip_update", message, "optim.clip_update=null"
    if optim.decay_follows == "peak" and optim.name == "sgd":
        message = "sgd's decay is a part of its gradient, so it follows the schedule"
        yield "optim.decay_follows", message, "schedule; or optim=adamw"
    ends = optim.schedule.stop_step if optim.schedule.name != "constant" and optim.schedule.final_ratio == 0.0 else None
    if optim.decay_follows == "peak" and ends is not None and recipe.train.epochs is None and ends < recipe.train.steps:
        message = (
            f"behind optim.schedule.stop_step={ends} the rate is 0, and kernels know decay as a multiple of the rate"
        )
        yield "optim.decay_follows", message, "schedule; or optim.schedule.final_ratio=0.01"


@rule("optim.clip_norm")
def clipping(recipe: Recipe) -> Findings:
    if recipe.optim.clip_norm == 0.0:
        yield "optim.clip_norm", "a gradient clipped to norm 0 trains nothing", "optim.clip_norm=null for no clipping"


@rule("train.ema", "memory.offload.home", "memory.offload.optimizer")
def averages(recipe: Recipe) -> Findings:
    offload = recipe.memory.offload
    if recipe.train.ema == 1.0:
        yield "train.ema", "at 1 the average stays at the first weights", "0.999"
    if recipe.train.ema is not None and offload.home == "disk" and offload.optimizer:
        message = "an average is updated in memory, where masters on a disk never are as a whole"
        yield "train.ema", message, "train.ema=null; or memory.offload.home=host"


@rule("optim.qk_clip", "memory.offload.home", "memory.offload.optimizer", "precision.master")
def qk_clip(recipe: Recipe) -> Findings:
    offload = recipe.memory.offload
    if recipe.optim.qk_clip is None:
        return
    if recipe.optim.qk_clip == 0.0:
        yield "optim.qk_clip", "attention without logits learns nothing", "optim.qk_clip=100"
    elif offload.home == "disk" and offload.optimizer:
        message = "masters on a disk are updated chunk by chunk, and are not read again to be scaled"
        yield "optim.qk_clip", message, "optim.qk_clip=null; or memory.offload.home=host"
    elif recipe.precision.master == "none":
        message = "weights without a master would be rounded to 8 bits each time that they are scaled"
        yield "optim.qk_clip", message, "optim.qk_clip=null; or precision.master=fp32"


@rule("model.mup_base", "model.weights", "model.freeze", "adapter.kind", "optim.name")
def mup(recipe: Recipe) -> Findings:
    if not recipe.model.mup_base:
        return
    fix = "leave it out (~model.mup_base)"
    if recipe.model.weights is not None or recipe.adapter.is_used:
        yield "model.mup_base", "its initial values are those of pretrained weights, not of a width", fix
    if recipe.model.freeze:
        yield "model.mup_base", "frozen parameters have no scale by width", fix
    if recipe.optim.name not in ("adamw", "lion"):
        message = f"muP's rates are those of adamw and lion; {recipe.optim.name} has others"
        yield "model.mup_base", message, f"{fix}; or optim=adamw"


METHOD_RULES = (
    averages, qk_clip, mup, updates, schedule, optimizer, muon, moments, clipping, noise_scale, patterns, adapter, preferences,
)  # fmt: skip
