"""Layouts in words: what of each parameter a rank holds, and over which axes its gradient is a sum."""

import re
from collections.abc import Sequence

from framework.mesh.layout import Layout
from framework.parallel.zero.plan_buffers import BufferPlan

# Layers that hold the same are one line.
LAYER_NUMBER = re.compile(r"\.\d+\.")


def describe_parameters(buffers: Sequence[BufferPlan]) -> str:
    """One line per kind of parameter: name with * for the layer's number, global and local shape, and how it is held."""
    rows: dict[str, tuple[str, str, str]] = {}
    for slot in (slot for buffer in buffers for slot in buffer.slots):
        name = LAYER_NUMBER.sub(".*.", slot.name)
        rows.setdefault(
            name, (_shape(slot.layout.shape), _shape(slot.layout.shape_local), describe_layout(slot.layout))
        )
    name_width, shape_width, local_width = (
        max(map(len, column)) for column in zip(*[(name, *row[:2]) for name, row in rows.items()], strict=True)
    )
    return "\n".join(
        f"  {name:<{name_width}}  {shape:>{shape_width}} -> {local:<{local_width}} {how}"
        for name, (shape, local, how) in sorted(rows.items())
    )


def describe_layout(layout: Layout) -> str:
    """A layout in words, such as `sharded over tp along dim 0, in 3 segments`, before ZeRO, which shards all alike."""
    words = []
    for shard in layout.shards:
        segments = f", in {len(shard.segments)} segments" if shard.segments else ""
        words.append(f"sharded over {shard.axis} along dim {shard.dim}{segments}")
    if layout.replicated:
        words.append(f"replicated over {', '.join(layout.replicated)}")
    if layout.partial:
        words.append(f"gradient partial over {', '.join(layout.partial)}")
    return "; ".join(words) or "whole"


def _shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
