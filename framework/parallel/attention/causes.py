"""Causes why the sequences of a model are not divided, and those that its config tells: ropes that go by the longest
position, and dropout of attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from framework.mesh.token_layout import ContextSlices
from framework.model.load import FORWARD_ERRORS
from framework.model.probe import small_copy
from framework.parallel.attention.documents import Documents
from framework.parallel.attention.hook import AttentionDropout, Hook, hook_attentions


@dataclass(frozen=True)
class Cause:
    """Why a model is refused. fix: what to set, if anything but cp would do."""

    what: str
    fix: str | None = None


def find_uneven_rope(config: PretrainedConfig, slices: ContextSlices, has_documents: bool) -> Iterator[Cause]:
    """Ropes that choose between two tables by the largest position that they are told, which ranks are told differently."""
    if (original := _original_positions(config)) is None or slices.context <= original:
        return
    last = [min(each.intervals[-1][1], slices.context) for each in map(slices.of_rank, range(slices.ranks))]
    if has_documents or min(last) <= original:
        told = "its documents have" if has_documents else "a rank has"
        what = (
            f"its longrope has one table for up to {original} positions, another for more, and where"
            f" batch.context={slices.context} is more, {told} fewer (longest on a rank: {min(last)})"
        )
        yield Cause(what, f"batch.context={original}")


def _original_positions(config: PretrainedConfig) -> int | None:
    """The positions up to which the config's longrope, if it has one, takes its table for short sequences."""
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *ropes.values()):
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope":
            return int(rope["original_max_position_embeddings"])
    return None


def find_dropout(config: PretrainedConfig) -> list[Cause]:
    """The dropout of attention, if the config asks for any."""
    dropouts = read_dropouts(config)
    if not dropouts:
        # A family that drops nothing by its config drops nothing.
        return []
    with small_copy(config, **dropouts) as model:
        model.train()
        hook_attentions(model, lambda: Hook(attend_to_nothing, lambda device: torch.arange(2), Documents(((0,),), 2)))
        try:
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64))
        except AttentionDropout as error:
            named = [path for path in dropouts if "att" in path] or list(dropouts)
            fix = " and ".join(f"model.config.{path}=0" for path in named)
            return [Cause(f"{error}, and which ones would differ with how a sequence is divided", fix)]
        except FORWARD_ERRORS:
            pass  # in training some draw what a small copy lacks; in evaluation it ran
    return []


def read_dropouts(config: PretrainedConfig) -> dict[str, float]:
    """Dropouts that the config asks for, by dotted names."""
    found = ((path, value) for path, value in _walk(config) if "drop" in path)
    return {path: value for path, value in found if isinstance(value, int | float) and value > 0}


def _walk(config: PretrainedConfig) -> Iterator[tuple[str, Any]]:
    """The config's values by dotted names."""
    for name, value in vars(config).items():
        if isinstance(value, PretrainedConfig):
            yield from ((f"{name}.{inner}", each) for inner, each in _walk(value))
        else:
            yield name, value


def attend_to_nothing(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    """An attention that mixes no tokens."""
    return v.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
