"""A run in numbers and words, before its first step."""

import shlex

import torch
from transformers import PretrainedConfig

from framework.comm.connect import Mesh
from framework.model.flops import flops_per_token, measure_model
from framework.model.load import build_meta
from framework.recipe.derive import derive
from framework.recipe.environment import describe_public
from framework.recipe.overrides import write_resume
from framework.recipe.schema import Recipe
from framework.track.flops import peak_flops
from framework.track.report import RunInfo


def describe_run(
    recipe: Recipe,
    config: PretrainedConfig,
    mesh: Mesh,
    run_id: str,
    start_step: int,
    unigram_entropy: float | None,
) -> RunInfo:
    """What observers are told first. unigram_entropy: of the validation split, nats per token."""
    derived = derive(recipe)
    model = build_meta(config, recipe.model.attention)
    size = measure_model(model)
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    run = f"{recipe.run.root}/{run_id}"
    return RunInfo(
        run_id=run_id,
        config=describe_public(recipe),
        total_steps=recipe.train.steps,
        start_step=start_step,
        tokens_per_step=derived.tokens_per_step,
        world=derived.world,
        degrees={name: mesh.axis(name).size for name in ("pp", "dp", "cp", "tp", "ep")},
        device=device,
        model=config.model_type,
        num_parameters=size.total,
        num_parameters_active=size.active,
        flops_per_token=flops_per_token(model, derived.context),
        peak_flops=peak_flops(device),
        unigram_entropy=unigram_entropy,
        commands={
            "resume": write_resume(recipe.launch.kind, run_id, recipe.run.root),
            "export": shlex.join(["meshwright", "export", run, "--to", f"{run}/export"]),
            "generate": shlex.join(["meshwright", "generate", f"{run}/export", "--prompt", "def "]),
        },
    )
