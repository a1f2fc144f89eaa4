"""Each dual is the adjoint of its partner, <y, A x> = <B y, x> in fp64, alone and through autograd; and sends what
theory says."""

import pytest
import torch

from framework.comm import duals
from framework.comm.communicator import read_traffic, subtract_traffic
from framework.comm.connect import connect
from framework.mesh.topology import Topology
from tests.grid import few_of

WORLDS = (1, 2, 3, 4)
SHOWN = (1, 3)  # one rank, and a number that divides nothing
SHAPE = (12, 24, 5)  # dims 0 and 1 divide by every world
ELEMENTS = 12 * 24 * 5

# (map and its arguments, its adjoint as a public map, kind of the input, kind of the output)
PAIRS = {
    "copy": (("copy_to", ()), ("reduce_from", ()), "replicated", "independent"),
    "reduce": (("reduce_from", ()), ("copy_to", ()), "independent", "replicated"),
    "join rows": (("join", (0,)), ("scatter", (0,)), "independent", "replicated"),
    "join columns": (("join", (-2,)), ("scatter", (-2,)), "independent", "replicated"),
    "gather": (("gather", (0,)), ("reduce_scatter", (0,)), "independent", "independent"),
    "scatter sums": (("reduce_scatter", (1,)), ("gather", (1,)), "independent", "independent"),
    "scatter": (("scatter", (1,)), ("join", (1,)), "replicated", "independent"),
}


def connect_world(rank, world, rendezvous):
    return connect(Topology(tp=world), torch.device("cpu"), rendezvous, rank, timeout_s=60)


def draw(shape, rank, kind, seed):
    """Random fp64: the same on all ranks when replicated, else each rank's own."""
    generator = torch.Generator().manual_seed(seed + (0 if kind == "replicated" else 100 * (rank + 1)))
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def inner(a, b, kind, mesh):
    """The inner product of the whole vectors: once if replicated, summed over ranks if independent."""
    product = (a * b).sum()
    if kind == "independent":
        product = duals.reduce_from(product.reshape(1), mesh.axis("tp"))
    return product.item()


def close(a, b):
    return abs(a - b) <= 1e-12 * ELEMENTS


def check_adjoint(rank, world, rendezvous, name):
    (map_name, arguments), partner, kind_in, kind_out = PAIRS[name]
    mesh = connect_world(rank, world, rendezvous)
    axis = mesh.axis("tp")

    def forward(x):
        return getattr(duals, map_name)(x, axis, *arguments)

    x = draw(SHAPE, rank, kind_in, seed=1).requires_grad_()
    result = forward(x)
    y = draw(result.shape, rank, kind_out, seed=2).requires_grad_()
    (gradient,) = torch.autograd.grad(result, x, y, create_graph=True)
    assert close(inner(y, result, kind_out, mesh), inner(gradient, x, kind_in, mesh)), "gradient is not the adjoint"
    if partner is not None:
        assert torch.equal(gradient, getattr(duals, partner[0])(y, axis, *partner[1])), "partner is not the adjoint"

    z = draw(SHAPE, rank, kind_in, seed=3)
    (twice,) = torch.autograd.grad(gradient, y, z)
    assert torch.allclose(twice, forward(z), rtol=0, atol=1e-12), "the adjoint's adjoint is not the map"

    (gradient_of_two_uses,) = torch.autograd.grad(forward(x) + forward(2 * x), x, y)
    assert torch.allclose(gradient_of_two_uses, 3 * gradient, rtol=0, atol=1e-12)
    mesh.close()


def compare_with_definition(rank, world, rendezvous):
    """What the maps do, on inputs that every rank knows."""
    mesh = connect_world(rank, world, rendezvous)
    axis = mesh.axis("tp")
    xs = [draw(SHAPE, r, "independent", seed=1) for r in range(world)]
    x, total = xs[rank], sum(xs)
    assert torch.equal(duals.copy_to(x, axis), x)
    assert torch.allclose(duals.reduce_from(x, axis), total, rtol=0, atol=1e-14)
    for dim in (0, 1):
        assert torch.equal(duals.join(x, axis, dim), torch.cat(xs, dim))
        assert torch.allclose(duals.reduce_scatter(x, axis, dim), total.chunk(world, dim)[rank], rtol=0, atol=1e-14)
        assert torch.equal(duals.scatter(xs[0], axis, dim), xs[0].chunk(world, dim)[rank])
    transposed = x.transpose(0, 1)
    assert torch.equal(duals.join(transposed, axis, 0), torch.cat([s.transpose(0, 1) for s in xs]))
    mesh.close()


def read_ledger(rank, world, rendezvous, name):
    """What one forward and backward pass sends."""
    (map_name, arguments), _, _, _ = PAIRS[name]
    mesh = connect_world(rank, world, rendezvous)
    x = torch.zeros(SHAPE, requires_grad=True)
    before = read_traffic(mesh.axes)
    getattr(duals, map_name)(x, mesh.axis("tp"), *arguments).sum().backward()
    carried = subtract_traffic(read_traffic(mesh.axes), before)
    mesh.close()
    return carried


def use_in_place(rank, world, rendezvous):
    """A model may write to the result of a dual, as to any activation."""
    mesh = connect_world(rank, world, rendezvous)
    x = torch.ones(4, requires_grad=True)
    for name in ("copy_to", "reduce_from"):
        result = getattr(duals, name)(x * 2, mesh.axis("tp"))
        result *= 3
        (gradient,) = torch.autograd.grad(result.sum(), x)
        assert gradient.tolist() == [6.0 * (world if name == "copy_to" else 1)] * 4
    mesh.close()


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("world", few_of(WORLDS, SHOWN.__contains__))
def test_each_dual_is_the_adjoint_of_its_partner(pool, world, name):
    pool.run(world, check_adjoint, name)


@pytest.mark.parametrize("world", few_of(WORLDS, SHOWN.__contains__))
def test_duals_equal_their_definition(pool, world):
    pool.run(world, compare_with_definition)


@pytest.mark.parametrize("world", few_of(WORLDS, SHOWN.__contains__))
def test_results_may_be_changed_in_place(pool, world):
    pool.run(world, use_in_place)


@pytest.mark.parametrize("world", few_of([2, 3, 4], (3).__eq__))
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("copy", lambda x, n: {"all_reduce": (1, 2 * (n - 1) * x // n)}),
        ("reduce", lambda x, n: {"all_reduce": (1, 2 * (n - 1) * x // n)}),
        ("join rows", lambda x, n: {"all_gather": (1, (n - 1) * x)}),
        ("scatter sums", lambda x, n: {"reduce_scatter": (1, (n - 1) * x // n), "all_gather": (1, (n - 1) * x // n)}),
        ("scatter", lambda x, n: {"all_gather": (1, (n - 1) * x // n)}),
    ],
)
def test_forward_and_backward_send_what_theory_says(pool, world, name, expected):
    for carried in pool.run(world, read_ledger, name):
        assert carried == {"tp": expected(ELEMENTS * 4, world)}


def test_one_rank_sends_nothing_and_builds_no_graph(pool):
    assert pool.run(1, read_ledger, "join rows") == [{}]
    assert pool.run(1, is_input_itself) == [True]


def is_input_itself(rank, world, rendezvous):
    mesh = connect_world(rank, world, rendezvous)
    x = torch.zeros(SHAPE, requires_grad=True)
    maps = [getattr(duals, map_name)(x, mesh.axis("tp"), *arguments) for (map_name, arguments), *_ in PAIRS.values()]
    return all(result is x for result in maps)
