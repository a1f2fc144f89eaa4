"""The Python API (docs/extend.md): `from framework import compose, make_plan, build`. A name is imported when it is asked for, so
`import framework` takes no time."""

from importlib import import_module
from types import MappingProxyType
from typing import Any

# In the order in which a run needs them; examples/api has a script for each step.
API = MappingProxyType(
    {
        "compose": "recipe.compose",
        "load_config": "model.load",
        "make_plan": "plan.plan",
        "connect": "comm.connect",
        "build": "train.build",
        "Microbatch": "data.pack",
        "train_step": "train.step",
        "prepare": "data.prepare",
        "Loader": "data.loader",
        "Loop": "train.loop",
        "Entry": "checkpoint.staging",
        "newest_checkpoint": "checkpoint.commit",
        "load_checkpoint": "checkpoint.load",
    }
)
__all__ = [*API]  # noqa: PLE0604  (of what __getattr__ finds)


def __getattr__(name: str) -> Any:
    """A name of API, from its own file."""
    if name not in API:
        raise AttributeError(f"module 'framework' has no attribute {name!r}; there are {', '.join(API)}")
    return getattr(import_module(f"framework.{API[name]}"), name)
