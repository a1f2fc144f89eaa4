"""Build a model in its layout, and take steps on batches of your own.

One process here. Under `torchrun --nproc-per-node N` each rank runs this with launch.ranks=N, and gives its own microbatches.
"""

import torch

from framework import Microbatch, build, compose, connect, load_config, make_plan, train_step

recipe = compose(["experiment=quickstart", "launch.ranks=1", "zero=stage_3", "batch.context=64"]).require()
config = load_config(recipe.model)
plan = make_plan(recipe, config)
mesh = connect(plan.topology, torch.device("cpu"))
run = build(plan, mesh)

tokens = torch.arange(4 * 65).view(4, 65) % config.vocab_size
microbatches = [Microbatch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), None) for rows in tokens.split(2)]
for step in range(5):
    values = train_step(run, microbatches, step, lr=1e-3).read()  # waits for the device, as Loop does not
    print(f"step {step + 1}: loss {values.loss:.4f}, gradient norm {values.gradient_norm:.3f}")
run.close()
mesh.close()
