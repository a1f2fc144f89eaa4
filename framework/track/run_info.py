"""A run in numbers and words, before its first step."""

import shlex

import torch

from framework.comm.connect import Mesh
from framework.plan.plan import Plan
from framework.recipe.environment import describe_public
from framework.recipe.overrides import write_resume
from framework.recipe.schema import Run
from framework.track.flops import find_peak
from framework.track.report import RunInfo


def describe_run(
    plan: Plan,
    mesh: Mesh,
    named: Run,
    start_step: int,
    unigram_entropy: float | None,
    sources: tuple[str, ...],
    prompt: str,
) -> RunInfo:
    """Facts that observers are told first. named: the keys that name the run's folder; unigram_entropy: of the validation split,
    nats per token; sources: names of the data's; prompt: a text that the model may continue."""
    recipe = plan.recipe
    device = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else "cpu"
    run_id = str(named.id)
    run = f"{named.root}/{run_id}"
    return RunInfo(
        run_id=run_id,
        config=describe_public(recipe),
        total_steps=recipe.train.steps,
        start_step=start_step,
        tokens_per_step=plan.derived.tokens_per_step,
        accumulation=plan.derived.accumulation,
        world=plan.derived.world,
        degrees=plan.derived.degrees,
        device=device,
        model=plan.config.model_type,
        num_parameters=plan.size.total,
        num_parameters_active=plan.size.active,
        flops_per_token=plan.flops_per_token,
        peak_flops=find_peak(device, recipe.cluster),
        unigram_entropy=unigram_entropy,
        sources=sources,
        has_experts=bool(plan.mixtures),
        commands={
            "resume": write_resume(recipe.launch.kind, named),
            "export": shlex.join(["meshwright", "export", run, "--to", f"{run_id}-model"]),
            "generate": shlex.join(["meshwright", "generate", run, "--prompt", prompt]),
        },
    )
