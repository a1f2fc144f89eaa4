"""Compose a recipe as the command line does, and read what follows from it: nothing here imports torch."""

from framework import compose
from framework.recipe.derive import derive

composition = compose(["experiment=quickstart", "parallel.tp=2", "optim.name=adamv"])
for problem in composition.problems:  # all mistakes at once
    print(f"{problem.key} = {problem.value} ({problem.origin}): {problem.message}; {problem.fix}")

recipe = compose(["experiment=quickstart", "parallel.tp=2"]).require()  # RecipeError where there are any
derived = derive(recipe)
print(f"{derived.world} ranks, {derived.degrees}, {derived.sequences_per_step * derived.context:,} tokens a step")
