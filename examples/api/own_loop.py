"""A loop of your own over prepared data: reports on the console, and what you like between steps.

`meshwright train` is this with a run's folder, saves, resumes and rewinds around it: framework/train/rank.py.
"""

from pathlib import Path

import torch

from framework import Loader, Loop, build, compose, connect, load_config, make_plan, prepare
from framework.checkpoint.commit import Retention
from framework.checkpoint.save import Saver
from framework.data.prepared import open_found
from framework.monitor.watchdog import Watchdog
from framework.track.console import Console
from framework.track.report import Observers, RunInfo
from framework.train.loop import SavePolicy
from framework.train.reports import Reporter
from framework.train.state import RunState

words = ["experiment=quickstart", "launch.ranks=1", "train.steps=5", "optim.schedule.warmup_steps=0"]
recipe = compose([*words, "data.sources.stdlib.path=texts"]).require()
prepared = open_found(prepare(recipe))
plan = make_plan(recipe, load_config(recipe.model))
mesh = connect(plan.topology, torch.device("cpu"))
run, derived = build(plan, mesh), plan.derived
loader = Loader(
    prepared,
    seed=recipe.train.seed,
    context=derived.context,
    pack=recipe.data.packing,
    sequences_per_microbatch=derived.sequences_per_microbatch,
    num_microbatches=derived.accumulation,
)
observers, watchdog = Observers([Console()]), Watchdog()
size = {"tokens_per_step": derived.tokens_per_step, "num_parameters": plan.size.total}
observers.open(info := RunInfo("own-loop", {}, recipe.train.steps, model=plan.config.model_type, **size))
saver = Saver(Path("checkpoints"), mesh.axis("world"), Retention(1))
policy = SavePolicy(recipe.checkpoint, recipe.train.steps, saver)
reporter = Reporter(run, plan, info, observers, saver, watchdog)
loop = Loop(run, RunState("own-loop", prepared.fingerprint), plan, loader, policy, reporter, watchdog)
with loader:
    for step in loop.steps():  # the step is sent to the device; its loss is read one step later
        print(f"after step {step}: {loop.state.samples} sequences consumed")
observers.close(0)
run.close()
mesh.close()
