"""Plan a layout and ask the plan: which rank holds what, and how many bytes. No device is touched, nothing is sent."""

from framework import compose, load_config, make_plan

recipe = compose(["experiment=quickstart", "launch.ranks=8", "parallel.tp=2", "zero=stage_3"]).require()
plan = make_plan(recipe, load_config(recipe.model))
for rank in (0, plan.topology.world - 1):
    layouts = plan.of_rank(rank).layouts
    name = next(name for name in layouts if "q_proj" in name)
    (box,) = layouts[name].boxes()
    print(f"rank {rank}: {plan.memory(rank).allocated / 2**20:.1f} MiB; of {name} {layouts[name].shape} {box.slices()}")
