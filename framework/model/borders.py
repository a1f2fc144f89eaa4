"""Borders of pipeline stages: the values that the layers behind a cut take from in front of it, found by the model's own graph.

Beside hidden states a family may hand layers the first layer's input (zamba), an embedding of each token for each layer (gemma 3n
and 4), keys and values of an earlier layer (the same), or a router's states (zaya). Which of a layer's arguments come from where
is read off autograd's graph of one forward: an argument belongs to the border in front of layer `start` if what it was computed
from, back to the results of layers, lies in front of that layer, and if a node of a layer behind reads it. No family has a name
here.

Shapes: B sequences, T tokens of each. A message is [B, T, W]: the values side by side, each with its other dims flattened, so
that its gradient is that of all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from framework.torch_private import ITEM, TorchDispatchMode, next_node_number, number_of_node

# From (positional arguments, keyword arguments) of a layer to a tensor: indices and keys.
Path = tuple[Any, ...]
# A result in autograd's graph: the node that computes it, and which of its results it is.
Edge = tuple[Any, int]
# A forward's sequences and tokens: sizes that no other dim of a small model has.
ROWS, TOKENS = 5, 13
# In front of the first layer.
START = -1


@dataclass(frozen=True)
class Value:
    """A value of a border. places: the layers that take it, each with where among its arguments. rows: the dims of sequences and
    of tokens; sizes: of the others, of all ranks; dtype: that it has beside weights of the compute dtype."""

    places: tuple[tuple[int, Path], ...]
    rows: tuple[int, int]
    sizes: tuple[int, ...]
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Elements of a token."""
        return prod(self.sizes)

    def pack(self, x: Tensor) -> Tensor:
        """The part of a message, [B, T, width]."""
        rows = x.movedim(self.rows, (0, 1))
        return rows.reshape(*rows.shape[:2], -1)

    def unpack(self, x: Tensor) -> Tensor:
        """The value from its part of a message, [B, T, width]."""
        return x.reshape(*x.shape[:2], *self.sizes).movedim((0, 1), self.rows).to(self.dtype)

    def blank(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """Zeros in the form of the value x, of `rows` = B, T, yet without memory."""
        shape = list(x.shape)
        for dim, size in zip(self.rows, rows, strict=True):
            shape[dim] = size
        return x.new_zeros(()).expand(shape)


# Hidden states first.
Border = tuple[Value, ...]


def message_width(border: Border) -> int:
    """W of a border's messages."""
    return sum(value.width for value in border)


def message_dtype(border: Border) -> torch.dtype:
    """The dtype that holds all of a border's values."""
    found = border[0].dtype
    for value in border:
        found = torch.promote_types(found, value.dtype)
    return found


def pack(border: Border, values: Sequence[Tensor]) -> Tensor:
    """The message of a border, [B, T, W]."""
    parts = [value.pack(x) for value, x in zip(border, values, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def unpack(border: Border, message: Tensor) -> list[Tensor]:
    """The values of a message [B, T, W]."""
    parts = message.split([value.width for value in border], dim=-1) if len(border) > 1 else [message]
    return [value.unpack(x) for value, x in zip(border, parts, strict=True)]


def read(container: Any, path: Path) -> Any:
    """The tensor at a path."""
    for key in path:
        container = container[key]
    return container


def write(container: Any, path: Path, value: Tensor) -> Any:
    """The container with a value at a path: a mapping, which layers share, is written to; a tuple, which may be too short, is
    made anew."""
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(container, Mapping):
        found: Any = container
        found[key] = write(container.get(key), rest, value)
        return found
    items = list(container or ())
    items += [None] * (key + 1 - len(items))
    items[key] = write(items[key], rest, value)
    return tuple(items)


def _leaves(container: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors that have a gradient, with their paths."""
    if isinstance(container, Tensor):
        if container.requires_grad:
            yield path, container
        return
    items: Any = ()
    if isinstance(container, tuple | list):
        items = enumerate(container)
    elif isinstance(container, Mapping):
        items = container.items()
    for key, each in items:
        yield from _leaves(each, (*path, key))


def _edge(tensor: Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


@dataclass(frozen=True)
class _Leaf:
    edge: Edge
    shape: torch.Size
    dtype: torch.dtype


class Trace:
    """The arguments of layers in one forward of a model, [ROWS, TOKENS] tokens, on the CPU or on meta.

    layers: paths of modules. counts: of the outputs of each call, in order, 0 for a tensor alone.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str], tokens: Tensor):
        self.counts: list[int] = []
        self._entries: list[dict[Path, _Leaf]] = [{} for _ in layers]
        # The first number of a node of each layer: nodes are numbered as they are made.
        self._numbers = [0] * len(layers)
        self._born: dict[Edge, int] = {}
        self._hidden: Path = ()
        handles = []
        for index, layer in enumerate(layers):
            module = model.get_submodule(layer)
            handles.append(module.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._leave, index), with_kwargs=True))
        try:
            with torch.enable_grad(), _Answers():
                logits = model(input_ids=tokens).logits
        finally:
            for handle in handles:
                handle.remove()
        self.logits: Tensor = logits.detach()
        self._last_reads = _find_last_reads(logits)

    def _enter(self, index: int, layer: nn.Module, args: Any, kwargs: Any) -> None:
        found = {path: _Leaf(_edge(x), x.shape, x.dtype) for path, x in _leaves((args, kwargs))}
        self._entries[index], self._numbers[index] = found, next_node_number()
        self._hidden = (1, "hidden_states") if "hidden_states" in kwargs else (0, 0)

    def _leave(self, index: int, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.counts.append(len(output) if isinstance(output, tuple | list) else 0)
        taken = {leaf.edge for leaf in self._entries[index].values()}
        # A tensor that a layer leaves in a container passed to it is one of its results, too.
        for _, tensor in _leaves((args, kwargs, output)):
            if (edge := _edge(tensor)) not in taken:
                self._born.setdefault(edge, index)

    @cached_property
    def _origins(self) -> dict[Edge, set[int]]:
        edges = {leaf.edge for entry in self._entries for leaf in entry.values()}
        return {edge: self._find_origins(edge) for edge in edges}

    def _find_origins(self, edge: Edge) -> set[int]:
        """The layers whose results a value is computed from; START where it is from parameters without any layer between."""
        found, seen, left = set[int](), set[Edge](), [edge]
        while left:
            each = left.pop()
            if each in seen:
                continue
            seen.add(each)
            if each in self._born:
                found.add(self._born[each])
                continue
            before = [(node, number) for node, number in each[0].next_functions if node is not None]
            left += before
            if not before:
                found.add(START)
        return found

    def border(self, start: int) -> Border | None:
        """The values that layers from `start` on read from in front of it, hidden states first. None where one of them has no
        dims of sequences and tokens, or hidden states are not among them."""
        places: dict[Edge, list[tuple[int, Path]]] = {}
        leaves: dict[Edge, _Leaf] = {}
        for index, path, leaf in self._taken(start):
            # gemma 4 hands the keys of a layer to all others, whether or not they read them.
            if self._last_reads.get(leaf.edge, -1) >= self._numbers[start]:
                places.setdefault(leaf.edge, []).append((index, path))
                leaves[leaf.edge] = leaf
        values = [_value_of(leaf, tuple(places[edge])) for edge, leaf in leaves.items()]
        if not values or values[0] is None or values[0].places[0] != (start, self._hidden):
            return None
        return None if None in values else tuple(value for value in values if value is not None)

    def is_plain(self, start: int) -> bool:
        """Whether layers from `start` on are handed no more than one value from in front of it."""
        return len({leaf.edge for _, _, leaf in self._taken(start)}) == 1

    def _taken(self, start: int) -> Iterator[tuple[int, Path, _Leaf]]:
        """The arguments of layers from `start` on that come from in front of it."""
        for index, entry in enumerate(self._entries[start:], start):
            for path, leaf in sorted(entry.items(), key=lambda item: item[0] != self._hidden):
                # A tensor computed from both sides is left to the stage's own code; the comparison of results covers it.
                if max(self._origins[leaf.edge]) < start:
                    yield index, path, leaf


def _find_last_reads(result: Tensor) -> dict[Edge, int]:
    """The largest number of a node that reads each value from which the result is computed."""
    found, seen, left = dict[Edge, int](), set[Any](), [result.grad_fn]
    while left:
        node: Any = left.pop()
        if node in seen:
            continue
        seen.add(node)
        for edge in node.next_functions:
            if edge[0] is not None:
                found[edge] = max(found.get(edge, -1), number_of_node(node))
                left.append(edge[0])
    return found


def _value_of(leaf: _Leaf, places: tuple[tuple[int, Path], ...]) -> Value | None:
    if leaf.shape.count(ROWS) != 1 or leaf.shape.count(TOKENS) != 1:
        return None
    rows = leaf.shape.index(ROWS), leaf.shape.index(TOKENS)
    return Value(places, rows, tuple(size for dim, size in enumerate(leaf.shape) if dim not in rows), leaf.dtype)


class _Answers(TorchDispatchMode):
    """Answers the host's questions to tensors on meta, which have no values: yes. Positions then do not restart, and a mask hides
    nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ITEM and args[0].is_meta:
            return 1
        return func(*args, **(kwargs or {}))
