"""Rules between the keys of `memory` and `precision`, for `check.py`: what may be recomputed, offloaded, and kept in few bits."""

from collections.abc import Iterator

from framework.recipe.problem import Problem
from framework.recipe.schema import Memory, Recipe

# Why the optimizer has to have weights of its own beside some compute dtypes.
NO_MASTER = {
    "fp16": "fp16 has nothing between 0 and 6e-8: small weights and updates would be lost, however they are rounded",
    "fp8": "nothing has shown that fp8 learns from weights that bf16 has rounded",
    "auto": "precision.compute=auto may be fp32 here, where weights are what the optimizer updates already",
}


def find_checkpointing_problems(recipe: Recipe) -> Iterator[Problem]:
    memory, key = recipe.memory, "memory.activation_checkpointing"
    policy = memory.activation_checkpointing
    if policy == "auto" and memory.budget_gb is None:
        message = "chooses by memory.budget_gb, which is not set: a plan does not know what else a device holds"
        yield Problem(key, policy, message, "memory.budget_gb=70; or memory.activation_checkpointing=selective")
    if policy != "auto" and memory.budget_gb is not None:
        message = f"is met by memory.activation_checkpointing=auto only, not by {policy}"
        yield Problem(
            "memory.budget_gb", memory.budget_gb, message, "leave it out (~memory.budget_gb); or " + f"{key}=auto"
        )
    chooses = policy in ("selective", "auto")
    if not chooses and memory.kept_operations != Memory().kept_operations:
        message = f"with {key}={policy} no operation's output is kept by name"
        fix = f"leave it out (~memory.kept_operations); or {key}=selective"
        yield Problem("memory.kept_operations", memory.kept_operations, message, fix)
    if chooses and memory.compile == "always":
        message = "keeps outputs of operations, which a compiled layer has inside of its graph: the compiler decides what is kept"
        yield Problem(key, policy, message, f"{key}=full; or memory.compile=never")


def find_offload_problems(recipe: Recipe) -> Iterator[Problem]:
    offload, stage = recipe.memory.offload, recipe.zero.stage
    if recipe.launch.device == "cpu":
        yield from find_offload_to_device(recipe)
    yield from _disk(recipe)
    if offload.parameters and stage < 3:
        message = (
            f"with zero.stage={stage} whole parameters are resident on the device: there are no shards to fetch in turn"
        )
        fix = "zero.stage=3; or memory.offload.parameters=0 and memory.offload.optimizer=1"
        yield Problem("memory.offload.parameters", offload.parameters, message, fix)


def find_activation_offload_problems(recipe: Recipe) -> Iterator[Problem]:
    key, fraction, policy = (
        "memory.offload.activations",
        recipe.memory.offload.activations,
        recipe.memory.activation_checkpointing,
    )
    if fraction and policy not in ("none", "full"):
        message = (
            f"memory.activation_checkpointing={policy} keeps tensors of its own for backward, which autograd does not know and"
            " offload does not reach"
        )
        other = "full or none" + (" and ~memory.budget_gb" if policy == "auto" else "")
        yield Problem(key, fraction, message, f"{key}=0; or memory.activation_checkpointing={other}")
    if recipe.launch.device == "cpu":  # said by the rule of all offload; a search asks this one first
        yield from (problem for problem in find_offload_to_device(recipe) if problem.key == key)


def _disk(recipe: Recipe) -> Iterator[Problem]:
    offload = recipe.memory.offload
    # On a CPU they have no home at all: `find_offload_to_device` says so.
    if offload.home == "disk" and offload.activations and recipe.launch.device != "cpu":
        key = "memory.offload.activations"
        message = "memory.offload.home=disk is for masters and moments: activations go to the host's memory only"
        yield Problem(key, offload.activations, message, f"{key}=0; or memory.offload.home=host")
    if offload.home == "disk" and offload.disk_path is None:
        message = "home=disk needs a folder for the files of the states"
        yield Problem("memory.offload.disk_path", None, message, "name a folder on a disk of each node; or home=host")
    if offload.home == "disk" and not offload.optimizer:
        message = "no unit's states go to that disk: memory.offload.optimizer is 0"
        yield Problem("memory.offload.home", "disk", message, "memory.offload.optimizer=1; or home=host")
    if offload.home == "disk" and recipe.model.router_bias_rate:
        message = "biases of routers are moved in memory, and may be parameters whose masters are on the disk"
        fix = "model.router_bias_rate=0; or memory.offload.home=host"
        yield Problem("model.router_bias_rate", recipe.model.router_bias_rate, message, fix)
    if offload.home == "disk" and recipe.precision.moments != "fp32":
        message = "moments of few bits are kept and rounded in memory"
        fix = "precision.moments=fp32; or memory.offload.home=host"
        yield Problem("precision.moments", recipe.precision.moments, message, fix)
    if offload.home == "disk" and recipe.precision.master == "none":
        message = "weights without a master are widened and rounded in memory"
        yield Problem("precision.master", "none", message, "precision.master=fp32; or memory.offload.home=host")
    if offload.home == "host" and offload.disk_path is not None:
        message = "nothing is written there: memory.offload.home is host"
        fix = "memory.offload.home=disk; or leave it out (~memory.offload.disk_path)"
        yield Problem("memory.offload.disk_path", offload.disk_path, message, fix)


def find_offload_to_device(recipe: Recipe) -> Iterator[Problem]:
    """The fractions that would go from the host's memory to the host's memory, because ranks compute on CPUs."""
    # A disk is no memory of the host: states there leave its memory on a CPU as well.
    names = ("optimizer", "parameters", "activations")
    for name in names[recipe.memory.offload.home == "disk" :]:
        fraction = getattr(recipe.memory.offload, name)
        if fraction:
            message = (
                "the device is the host (launch.device=cpu): nothing would leave its memory, and copies would be added"
            )
            fix = f"memory.offload.{name}=0; or launch.device=cuda"
            yield Problem(f"memory.offload.{name}", fraction, message, fix)


def find_precision_problems(recipe: Recipe) -> Iterator[Problem]:
    precision = recipe.precision
    if precision.compute != "fp64" and precision.reduce == "fp64" and precision.master != "fp64":
        message = f"gradients are summed in the dtype of precision.master={precision.master}: a wider one adds nothing"
        fix = "precision.reduce=fp32"
        yield Problem("precision.reduce", "fp64", message, fix)
    if precision.master == "none" and precision.compute != "bf16":
        message = NO_MASTER.get(precision.compute, f"weights are in {precision.compute} already: nothing is saved")
        fix = "precision.master=fp32; or precision.compute=bf16"
        yield Problem("precision.master", "none", message, fix)
        return
    if precision.fp8_scaling != "tensor" and precision.compute != "fp8":
        message = f"nothing is in fp8 with precision.compute={precision.compute}"
        yield Problem("precision.fp8_scaling", precision.fp8_scaling, message, "leave it out; or precision.compute=fp8")
    if precision.loss_scale is not None and precision.compute != "fp16":
        message = f"precision.compute={precision.compute} needs no loss scale: only fp16 loses small gradients"
        fix = "leave it out (~precision.loss_scale); or precision=fp16"
        yield Problem("precision.loss_scale", precision.loss_scale, message, fix)
    if precision.compute != "fp64":
        return
    for name in ("master", "reduce"):
        if getattr(precision, name) != "fp64":
            message = "less precise than precision.compute=fp64, which would be lost in it"
            fix = f"precision.{name}=fp64 (precision=fp64 sets all three); or precision.compute=fp32"
            yield Problem(f"precision.{name}", getattr(precision, name), message, fix)


def find_fp8_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.precision.compute == "fp8" and recipe.memory.compile == "always":
        message = "a compiled layer leaves its linear layers to the compiler, which would multiply them in bf16"
        yield Problem("precision.compute", "fp8", message, "memory.compile=never; or precision.compute=bf16")


def find_moments_problems(recipe: Recipe) -> Iterator[Problem]:
    key, moments, optim = "precision.moments", recipe.precision.moments, recipe.optim
    if moments != "fp32" and optim.name == "sgd" and optim.momentum == 0.0:
        message = "sgd with optim.momentum=0 has no moments, so it would do nothing"
        yield Problem(key, moments, message, f"leave it out (~{key}); or optim.momentum=0.9")
    elif moments == "int8" and optim.name == "lion":
        message = (
            "lion updates by a sign, as far for a small moment as for a large one, and of small ones int8 keeps the least: where"
            " it turns the sign of moment and gradient, an update is wrong by all of its size"
        )
        yield Problem(key, moments, message, f"{key}=bf16; or optim=adamw")
