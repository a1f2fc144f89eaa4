"""The oracle's arithmetic and the layouts' bits: the same numbers, over all of fp32's range."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from framework.mesh.layout import Layout, Run
from framework.optim.optimizers import FlatOptimizer, state_names
from framework.optim.states import Int8Storage, LowBitStates, MomentsDtype
from framework.optim.update_rules import FlatShard, ShardGroup
from framework.recipe.schema import Optim
from framework.verify.plain_rounding import PlainMoments

CPU = torch.device("cpu")
SHAPE = (30, 50)


@pytest.mark.parametrize(("name", "moments"), [("adamw", "bf16"), ("adamw", "int8"), ("sgd", "bf16"), ("sgd", "int8")])
def test_both_round_alike(name: str, moments: MomentsDtype) -> None:
    generator = torch.Generator().manual_seed(1)
    # Rows down to 1e-22, whose squares no normal number of fp32 has, and elements of a block 19 octaves apart.
    rows = torch.logspace(-22, 0, 30, dtype=torch.float64)[:, None]
    spread = torch.exp2(-19 * torch.rand(SHAPE, generator=generator, dtype=torch.float64))
    gradients = [rows * spread * torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(4)]
    value = torch.ones(SHAPE, dtype=torch.float64).flatten()
    shard = FlatShard((Layout(SHAPE, interval=(100, 1500)),), value[100:], torch.zeros(1400).double(), ("w",))
    optim = Optim(name=name, momentum=0.9 if name == "sgd" else 0.0)  # type: ignore[arg-type]
    ours = FlatOptimizer(optim.name, optim, [ShardGroup("default", (shard,), 1.0, 0.1)], CPU, moments, seed=3)
    assert isinstance(ours.states, LowBitStates)

    master = torch.nn.Parameter(torch.ones(SHAPE, dtype=torch.float64))
    group = [{"params": [master], "weight_decay": 0.1}]
    stock = (
        torch.optim.AdamW(group, lr=1e-2, betas=optim.betas, eps=optim.eps, foreach=False)
        if name == "adamw"
        else torch.optim.SGD(group, lr=1e-2, momentum=0.9, foreach=False)
    )
    blocks = torch.cat([torch.arange(100), ours.states.block_starts(shard)])
    plain = PlainMoments(optim, moments, 3, {"w": blocks.view(SHAPE)})
    for step, gradient in enumerate(gradients):
        shard.gradient.copy_(gradient.flatten()[100:])
        ours.step(1e-2, torch.ones((), dtype=torch.float64), torch.tensor(False), step)
        master.grad = gradient
        stock.step()
        plain.round(stock, {"w": master}, step)
    for key in state_names(optim):
        assert torch.equal(ours.state(shard, key).double(), stock.state[master][key].flatten()[100:]), key
    torch.testing.assert_close(shard.value, master.detach().flatten()[100:], rtol=1e-12, atol=0)


def test_a_lost_exponent_is_noticed() -> None:
    """Sabotage: every step loses the scale of one block."""
    encode = Int8Storage.encode

    def lose(storage: Int8Storage, blocks: Run, values: Tensor, bits: Tensor, shift: int) -> None:
        encode(storage, blocks, values, bits, shift)
        storage.exponents[3] = 0

    with patch.object(Int8Storage, "encode", lose), pytest.raises(AssertionError, match="exp_avg"):
        test_both_round_alike("adamw", "int8")
