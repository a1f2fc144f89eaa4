"""Train by the command line's own function, then read one weight of the checkpoint, whole, whatever layout has saved it."""

from pathlib import Path

import torch

from framework import Entry, cli, compose, connect, load_checkpoint, load_config, make_plan, newest_checkpoint
from framework.checkpoint.commit import open_checkpoint
from framework.mesh.layout import Layout

words = [
    "experiment=quickstart",
    "launch.ranks=1",
    "train.steps=2",
    "train.sample=null",
    "optim.schedule.warmup_steps=0",
    "data.sources.stdlib.path=texts",
]
assert cli.main(["train", *words, "train.validate_every_steps=null", "run.id=mine"]) == 0

checkpoint = newest_checkpoint(Path("runs/mine/checkpoints"))
name = "weight/model.embed_tokens.weight"
shape = open_checkpoint(checkpoint).entries[name].shape
entry = Entry(name, Layout(shape), torch.empty(shape).flatten())  # another layout here reads that rank's part of it
recipe = compose(words).require()
world = connect(make_plan(recipe, load_config(recipe.model)).topology, torch.device("cpu")).axis("world")
state = load_checkpoint(checkpoint, [entry], world)
print(f"step {state['step']}: {name} {list(shape)}, norm {entry.data.norm():.4f}")
