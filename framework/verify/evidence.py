"""What a training run leaves behind to be compared: losses, norms, first gradients, last weights."""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PretrainedConfig

from framework.comm.collectives import all_gather, gather_objects
from framework.comm.communicator import Communicator
from framework.mesh.layout import Layout
from framework.model.load import build_meta
from framework.model.loss import IGNORE
from framework.model.materialize import initialize_unit, seed_for
from framework.model.units import find_units


@dataclass(frozen=True)
class Evidence:
    """losses and norms by step; gradients after step 1, clipped, and weights after the last step, full, by parameter name.

    by_step: of a layout that the oracle follows (see `lion.py`), weights after each step. undecided: of an oracle that has
    followed, how many elements of a weight were updated by what rounding decides.
    """

    losses: tuple[float, ...]
    norms: tuple[float, ...]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    by_step: tuple[dict[str, Tensor], ...] = ()
    undecided: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class TokenBatch:
    """input_ids and shifted labels of one optimizer step, int64 [sequences, context]."""

    input_ids: Tensor
    labels: Tensor


def make_batches(config: PretrainedConfig, num_steps: int, sequences: int, context: int, seed: int) -> list[TokenBatch]:
    """Random tokens with deliberately uneven loss masks: each sequence keeps another share of its labels, one keeps none."""
    generator = torch.Generator().manual_seed(seed_for(seed, "verify"))
    vocabulary = config.get_text_config().vocab_size
    batches = []
    for _ in range(num_steps):
        tokens = torch.randint(0, vocabulary, (sequences, context + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        kept = torch.linspace(0.0, 1.0, sequences)[torch.randperm(sequences, generator=generator)]
        if sequences > 1:
            labels[torch.rand(labels.shape, generator=generator) >= kept[:, None]] = IGNORE
        batches.append(TokenBatch(tokens[:, :-1].clone(), labels))
    return batches


def initial_weights(config: PretrainedConfig, seed: int) -> dict[str, Tensor]:
    """The seeded initial parameters of the whole model, fp32, by name."""
    model = build_meta(config)
    values: dict[str, Tensor] = {}
    for unit in find_units(model):
        programs = initialize_unit(model, unit, seed, unit.parameters)
        values |= {name: program.whole() for name, program in programs.items()}
    return values


def perturb(values: Tensor, dtype: torch.dtype, seed: int) -> Tensor:
    """Values that are rounded otherwise: each moved up or down by one unit in the last place of `dtype` at the most, and by at
    least one where they are in that dtype themselves."""
    generator = torch.Generator().manual_seed(seed_for(seed, "perturb", values.numel()))
    u = 2 * torch.rand(values.shape, generator=generator, dtype=torch.float64) - 1
    u = u.sign() if values.dtype == dtype else u / 2
    return (values.double().cpu() * (1 + u * torch.finfo(dtype).eps)).to(values)


def gather_full(parts: dict[str, tuple[Layout, Tensor]], world: Communicator) -> dict[str, Tensor]:
    """Full tensors, on the CPU of every rank, from what each rank owns of them (flat, in interval order): box arithmetic only.
    They travel in fp64, which holds any other dtype's numbers."""
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
