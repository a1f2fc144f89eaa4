"""Entry: a named tensor as a rank saves and loads it. What only asks which checkpoints there are needs none, nor torch."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from framework.mesh.layout import Layout
from framework.parallel.zero.buffers import StoredTensor


@dataclass(frozen=True, eq=False)
class Entry:
    """A named tensor as one rank holds it: what to save, or where to load to.

    name: such as `weight/model.embed_tokens.weight`. data: 1-D, contiguous, exactly the elements that `layout` owns, in
    the order of its boxes; read when saving, filled in place when loading.
    """

    name: str
    layout: Layout
    data: torch.Tensor | StoredTensor

    def __post_init__(self) -> None:
        owned = self.layout.numel_owned
        assert self.data.shape == (owned,), (self.name, self.data.shape, owned)
        is_whole = not isinstance(self.data, torch.Tensor) or self.data.is_contiguous()
        assert is_whole, self.name

    def pieces(self) -> Iterator[torch.Tensor]:
        """The data from first to last, each piece until the next is asked for."""
        return iter((self.data,)) if isinstance(self.data, torch.Tensor) else self.data.pieces()


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")
