"""Evidence of a training run, for comparison: losses, norms, first gradients, last weights."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PretrainedConfig

from framework.comm.collectives import all_gather, gather_objects
from framework.comm.communicator import Communicator
from framework.errors import ModelError
from framework.mesh.layout import Layout
from framework.model.load import build_meta
from framework.model.loss import IGNORE
from framework.model.materialize import initialize_unit, seed_for
from framework.model.units import find_units

# Tokens of a document on average, where documents are packed: several in a row of a dozen tokens.
DOCUMENT_LENGTH = 4


class NothingToCompare(ModelError):
    """Stock transformers does not train the model, so that nothing can be said of a layout."""


@dataclass(frozen=True)
class Evidence:
    """Losses and norms by step; clipped gradients of step 1 and weights after the last step, both whole, by parameter name.

    by_step: weights after each step, of a layout that the oracle follows (see `lion.py`). blocks: of its moments in int8 (see
    `plain_moments.py`). undecided: by weight, the number of elements whose update's sign was decided by rounding, of an oracle
    that has followed.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    by_step: tuple[dict[str, Tensor], ...] = ()
    undecided: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenBatch:
    """The tokens of one optimizer step: input_ids and shifted labels, both int64 [sequences, context]. position_ids: alike,
    where documents are packed; None: 0 to context - 1 in each row."""

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor | None = None


def make_batches(
    config: PretrainedConfig, num_steps: int, sequences: int, context: int, seed: int, packs_documents: bool = False
) -> list[TokenBatch]:
    """Random tokens with uneven loss masks: each sequence keeps a different share of its labels, one keeps none.

    packs_documents: rows are documents of random lengths, whose positions restart and whose last tokens have no label.
    """
    # Averages over microbatches or ranks, which this project never takes, differ from the global mean only where masks do.
    generator = torch.Generator().manual_seed(seed_for(seed, "verify"))
    vocabulary = config.get_text_config().vocab_size
    batches = []
    for _ in range(num_steps):
        tokens = torch.randint(0, vocabulary, (sequences, context + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        kept = torch.linspace(0.0, 1.0, sequences)[torch.randperm(sequences, generator=generator)]
        if sequences > 1:
            labels[torch.rand(labels.shape, generator=generator) >= kept[:, None]] = IGNORE
        positions = None
        if packs_documents:
            begins = torch.rand(labels.shape, generator=generator) < 1 / DOCUMENT_LENGTH
            positions = _count_positions(begins)
            labels[:, :-1][begins[:, 1:]] = IGNORE
        batches.append(TokenBatch(tokens[:, :-1].clone(), labels, positions))
    return batches


def _count_positions(begins: Tensor) -> Tensor:
    """Positions that restart where documents begin. begins: bool [sequences, context]; a row's first token always begins one."""
    index = torch.arange(begins.shape[1]).expand(begins.shape)
    return index - (index * begins).cummax(dim=1).values


def initial_weights(config: PretrainedConfig, seed: int) -> dict[str, Tensor]:
    """The seeded initial parameters of the whole model, fp32 on the CPU, by name."""
    model = build_meta(config)
    values: dict[str, Tensor] = {}
    for unit in find_units(model):
        programs = initialize_unit(model, unit, seed, unit.parameters)
        values |= {name: program.whole() for name, program in programs.items()}
    return values


def perturb(values: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """A tensor like `values`, rounded differently: elements change by a random share of up to eps / 2 of `dtype`, so that they
    may round either way, and by plus or minus eps where `values` are of that dtype already."""
    generator = torch.Generator().manual_seed(seed_for(seed, "perturb", values.numel()))
    u = 2 * torch.rand(values.shape, generator=generator, dtype=torch.float64) - 1
    u = u.sign() if values.dtype == dtype else u / 2
    return (values.double().cpu() * (1 + u * torch.finfo(dtype).eps)).to(values)


def gather_full(parts: dict[str, tuple[Layout, Tensor]], world: Communicator) -> dict[str, Tensor]:
    """Full tensors by name, on the CPU of every rank, from the elements that each rank owns.

    parts: by name, the layout and its own elements, flat and in the order of the interval. Gathers over `world`, in fp64, which
    holds the numbers of any other dtype. Only box arithmetic, so that no code of the layouts under test puts them together.
    """
    own = torch.cat([flat.detach().double() for _, flat in parts.values()])
    owned = [(name, layout.shape, flat.dtype, layout.boxes()) for name, (layout, flat) in parts.items()]
    of_ranks = gather_objects((owned, len(own)), world)
    values = own.new_zeros(world.size, max(length for _, length in of_ranks))
    values[world.rank, : len(own)] = own
    all_gather(values, values[world.rank], world)
    full: dict[str, Tensor] = {}
    for (places, _), flat in zip(of_ranks, values.cpu(), strict=True):
        start = 0
        for name, shape, dtype, boxes in places:
            for box in boxes:
                if name not in full:
                    full[name] = torch.full(shape, torch.nan, dtype=dtype)
                full[name][box.slices()] = flat[start : start + box.numel].view(box.sizes)
                start += box.numel
    return full
