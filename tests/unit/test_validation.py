"""The loss of a validation: of all its tokens, and of those of each source."""

import pytest
import torch

from framework.comm.connect import connect
from framework.data.pack import Microbatch
from framework.mesh.topology import Topology
from framework.model.objective import count_tokens
from framework.train.validation import Validation


def microbatch(source, num_tokens):
    labels = torch.full((1, 4), -100)
    labels[0, :num_tokens] = 1
    return Microbatch(torch.zeros(1, 4, dtype=torch.int64), labels, None, source)


def test_losses_of_sources_are_means_over_their_own_tokens():
    """Whatever is added with whatever: microbatches of a device forget their source."""
    held_out = [microbatch(0, 4), microbatch(0, 2), microbatch(2, 1)]
    validation = Validation(held_out, num_sources=3)
    losses = iter(torch.tensor([8.0, 6.0, 5.0]))
    while taken := validation.take(2):
        validation.add(taken, [next(losses) for _ in taken], count_tokens)
    mesh = connect(Topology(), torch.device("cpu"))
    found = validation.means(mesh)
    assert found.mean == pytest.approx(19 / 7)
    assert found.by_source == (pytest.approx(14 / 6), None, 5.0)


def test_a_validation_of_nothing_has_no_loss_of_any_source():
    found = Validation((), num_sources=2).means(connect(Topology(), torch.device("cpu")))
    assert (found.mean, found.by_source) == (0.0, (None, None))
