"""Collectives equal their definition on 1 to 4 ranks, in every dtype and in every order of waits; their volume is
theory's."""

import warnings

import pytest
import torch

from framework.comm import algorithms, collectives
from framework.comm.codec import Rounding
from framework.comm.communicator import read_traffic, subtract_traffic, sum_traffic
from framework.comm.connect import connect
from framework.comm.objects import all_gather_object
from framework.mesh.topology import AXIS_NAMES, Topology
from tests.grid import few_of

WORLDS = (1, 2, 3, 4)
SHOWN = (1, 3)  # one rank, and a number that divides nothing
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int64)


def connect_world(rank, world, rendezvous, **degrees):
    topology = Topology(**degrees) if degrees else Topology(dp=world)
    return connect(topology, torch.device("cpu"), rendezvous, rank, timeout_s=60)


def inputs_of(world, shape, dtype, seed=0):
    """Every rank's input, known to every rank. Small integers: sums are exact in bf16 too."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-8, 9, shape, generator=generator).to(dtype) for _ in range(world)]


def compare_all(rank, world, rendezvous):
    """Each collective against its definition on the known inputs of all ranks."""
    mesh = connect_world(rank, world, rendezvous)
    axis = mesh.axis("dp")
    for dtype in DTYPES:
        xs = inputs_of(world, (world * 3, 5), dtype)

        for op, expected in (
            ("sum", sum(xs)),
            ("max", torch.stack(xs).amax(0)),
            ("min", torch.stack(xs).amin(0)),
        ):
            x = xs[rank].clone()
            collectives.all_reduce(x, axis, op)
            assert torch.equal(x, expected), (op, dtype)

        out = torch.empty(world * world * 3, 5, dtype=dtype)
        collectives.all_gather(out, xs[rank], axis)
        assert torch.equal(out, torch.cat(xs)), dtype

        out = torch.empty(3, 5, dtype=dtype)
        collectives.reduce_scatter(out, xs[rank], axis)
        assert torch.equal(out, sum(xs)[3 * rank : 3 * rank + 3]), dtype

        out = torch.empty(world * 3, 5, dtype=dtype)
        collectives.all_to_all(out, xs[rank], axis)
        assert torch.equal(out, torch.cat([x[3 * rank : 3 * rank + 3] for x in xs])), dtype

        x = xs[rank].clone()
        collectives.start_broadcast(x, axis, source=world - 1).wait()
        assert torch.equal(x, xs[-1]), dtype
    collectives.barrier(axis)
    assert all_gather_object({"rank": rank}, axis) == [{"rank": r} for r in range(world)]
    mesh.close()


def compare_in_place(rank, world, rendezvous):
    """The ZeRO forms: a shard gathered into the buffer it lives in, a buffer reduced into its own part."""
    mesh = connect_world(rank, world, rendezvous)
    axis = mesh.axis("batch")
    xs = inputs_of(world, (world, 7), torch.float32)
    buffer = torch.full((world, 7), -1.0)
    buffer[rank] = xs[0][rank]
    collectives.all_gather(buffer, buffer[rank], axis)
    assert torch.equal(buffer, xs[0])
    buffer = xs[rank].clone()
    collectives.reduce_scatter(buffer[rank], buffer, axis)
    assert torch.equal(buffer[rank], sum(xs)[rank])
    mesh.close()


def compare_forms(rank, world, rendezvous):
    """The forms for NCCL, here over gloo, beside those for gloo; and no word from torch about deprecated names."""
    warnings.simplefilter("error", FutureWarning)
    mesh = connect_world(rank, world, rendezvous)
    axis = mesh.axis("dp")
    xs = inputs_of(world, (world, 6), torch.float32)
    gathered, scattered = torch.empty(2, world * world * 6), torch.empty(2, 6)
    algorithms.gather_by_tensor(gathered[0], xs[rank], axis).wait()
    algorithms.gather_by_messages(gathered[1], xs[rank], axis).wait()
    algorithms.scatter_by_tensor(scattered[0], xs[rank], axis).wait()
    algorithms.scatter_by_messages(scattered[1], xs[rank], axis).wait()
    assert torch.equal(gathered[0], gathered[1])
    assert torch.equal(scattered[0], scattered[1])
    mesh.close()


def exchange_uneven_rows(rank, world, rendezvous):
    """Rank r sends (r + s) % 3 rows to rank s: some parts are empty."""
    mesh = connect_world(rank, world, rendezvous)
    rows = [[(source + to) % 3 for to in range(world)] for source in range(world)]
    in_splits, out_splits = rows[rank], [rows[source][rank] for source in range(world)]
    x = torch.cat([torch.full((n, 2), 10.0 * rank + to) for to, n in enumerate(in_splits)])
    out = torch.empty(sum(out_splits), 2)
    collectives.all_to_all(out, x, mesh.axis("dp"), out_splits, in_splits)
    expected = torch.cat([torch.full((n, 2), 10.0 * source + rank) for source, n in enumerate(out_splits)])
    assert torch.equal(out, expected)
    sent = mesh.axis("dp").traffic.bytes.get("all_to_all", 0)
    mesh.close()
    return sent, (sum(in_splits) - in_splits[rank]) * 2 * 4


def wait_in_reverse(rank, world, rendezvous):
    """Many operations of several kinds and sizes in flight on one axis."""
    mesh = connect_world(rank, world, rendezvous)
    axis = mesh.axis("dp")
    started, checks = [], []
    for turn in range(6):
        xs = inputs_of(world, (world * (turn + 1) * 700,), torch.float32, seed=turn)
        gathered, scattered = torch.empty(world * xs[0].numel()), torch.empty((turn + 1) * 700)
        reduced = xs[rank].clone()
        started.append(collectives.start_all_gather(gathered, xs[rank], axis))
        started.append(collectives.start_reduce_scatter(scattered, xs[rank], axis))
        started.append(collectives.start_all_reduce(reduced, axis))
        share = sum(xs).view(world, -1)[rank]
        checks += [(gathered, torch.cat(xs)), (scattered, share), (reduced, sum(xs))]
    for pending in reversed(started):
        pending.wait()
        pending.wait()
    assert all(torch.equal(result, expected) for result, expected in checks)
    mesh.close()


def mix_sizes(rank, world, rendezvous):
    """Small and large messages over two axes that share a group, several in flight."""
    mesh = connect_world(rank, world, rendezvous)
    first, second = mesh.axis("dp"), mesh.axis("world")
    assert first.group is second.group
    most = 2**15
    started, checks = [], []
    for turn, part in enumerate((1, most, most + 1, 0, 5, 3 * most, most - 1, 2)):
        axis = (first, second)[turn % 2]
        xs = inputs_of(world, (world * part,), torch.float32, seed=turn)
        mine = [x.view(world, -1)[rank].clone() for x in xs]
        gathered, scattered, reduced = torch.empty(world * part), torch.empty(part), mine[rank].clone()
        started.append(collectives.start_reduce_scatter(scattered, xs[rank], axis))
        started.append(collectives.start_all_gather(gathered, mine[rank], axis))
        started.append(collectives.start_all_reduce(reduced, axis))
        parts = [x.view(world, -1)[index] for index, x in enumerate(xs)]
        checks += [(scattered, sum(xs).view(world, -1)[rank]), (gathered, torch.cat(parts))]
        checks.append((reduced, sum(parts)))
        if turn % 3 == 2:
            while started:
                started.pop().wait()
    while started:
        started.pop().wait()
    assert [index for index, (found, expected) in enumerate(checks) if not torch.equal(found, expected)] == []
    mesh.close()


def reduce_rough_numbers(rank, world, rendezvous, dtype, numel):
    mesh = connect_world(rank, world, rendezvous)
    x = torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)
    collectives.all_reduce(x, mesh.axis("dp"))
    mesh.close()
    return x


def scatter_rough_numbers(rank, world, rendezvous):
    mesh = connect_world(rank, world, rendezvous)
    xs = [torch.randn(world, 1001, generator=torch.Generator().manual_seed(r)) for r in range(world)]
    collectives.reduce_scatter(xs[rank][rank], xs[rank], mesh.axis("dp"))
    mesh.close()
    return xs[rank][rank]


REDUCE_DTYPES = ((torch.float32, torch.bfloat16), (torch.float64, torch.float32))
ODD = 1001


def rough_inputs(world, dtype, reduce_dtype):
    """What every rank puts in, known to every rank, and the same as it goes over the reduce_dtype."""
    xs = [torch.randn(world, ODD, generator=torch.Generator().manual_seed(r), dtype=dtype) for r in range(world)]
    return xs, [x.to(reduce_dtype).to(dtype) for x in xs]


def sum_over_a_narrow_wire(rank, world, rendezvous, dtype, reduce_dtype):
    """Bitwise: parts of a sum, in place, and sums of the whole, whose odd size no number of ranks divides. Returns the bytes
    that were sent for them."""
    mesh = connect_world(rank, world, rendezvous)
    axis = mesh.axis("dp")
    xs, rounded = rough_inputs(world, dtype, reduce_dtype)
    total = sum(rounded) if world > 1 else xs[0]
    mine = xs[rank].clone()
    collectives.start_reduce_scatter(mine[rank], mine, axis, wire=Rounding(reduce_dtype)).wait()
    assert torch.equal(mine[rank], total[rank])
    whole = [xs[rank].flatten()[:ODD].clone() for _ in range(3)]
    under_way = [collectives.start_all_reduce(each, axis, wire=Rounding(reduce_dtype)) for each in whole]
    for pending in under_way:
        pending.wait()
    first = total.flatten()[:ODD]
    expected = first.to(reduce_dtype).to(dtype) if world > 1 else first
    assert all(torch.equal(each, expected) for each in whole)
    sent = axis.traffic.bytes
    mesh.close()
    return sent.get("reduce_scatter", 0), sent.get("all_reduce", 0)


def read_ledger(rank, world, rendezvous):
    """One call of each operation on a full tensor of 96 fp32 elements; and what the ledger says of it."""
    mesh = connect_world(rank, world, rendezvous)
    axis = mesh.axis("dp")
    full, share = torch.zeros(96), torch.zeros(96 // world)
    before = read_traffic(mesh.axes)
    collectives.all_reduce(full, axis)
    collectives.all_gather(full, share, axis)
    collectives.reduce_scatter(share, full, axis)
    collectives.all_to_all(torch.zeros(96), full, axis)
    collectives.start_broadcast(full, axis).wait()
    carried = subtract_traffic(read_traffic(mesh.axes), before)
    mesh.close()
    return carried, sum_traffic(carried)


def reduce_on_every_axis(rank, world, rendezvous, degrees):
    """The sum of rank numbers over each axis, and how many groups carry them."""
    mesh = connect_world(rank, world, rendezvous, **degrees)
    sums = {}
    for name in AXIS_NAMES:
        x = torch.tensor([rank])
        collectives.all_reduce(x, mesh.axis(name))
        sums[name] = x.item()
    groups = {id(group) for axis in mesh.axes.values() for group in axis.groups}
    mesh.close()
    return sums, len(groups)


@pytest.mark.parametrize("world", few_of(WORLDS, SHOWN.__contains__))
def test_collectives_equal_their_definition(pool, world):
    pool.run(world, compare_all)


@pytest.mark.parametrize("world", few_of(WORLDS, SHOWN.__contains__))
def test_gather_and_scatter_work_in_place(pool, world):
    pool.run(world, compare_in_place)


@pytest.mark.parametrize("world", [2, 3])
def test_the_forms_of_both_backends_agree(pool, world):
    pool.run(world, compare_forms)


@pytest.mark.parametrize("world", few_of(WORLDS, SHOWN.__contains__))
def test_all_to_all_moves_uneven_and_empty_parts(pool, world):
    for sent, others in pool.run(world, exchange_uneven_rows):
        assert sent == others


@pytest.mark.parametrize("world", few_of(WORLDS, SHOWN.__contains__))
def test_operations_in_flight_complete_in_any_order_of_waits(pool, world):
    pool.run(world, wait_in_reverse)


def test_small_and_large_messages_between_two_ranks_do_not_meet(pool):
    pool.run(2, mix_sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 1000, 300_001])
def test_all_reduce_is_bitwise_equal_on_all_ranks(pool, dtype, numel):
    results = pool.run(4, reduce_rough_numbers, dtype, numel)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("world", few_of([2, 3, 4], (3).__eq__))
def test_reduce_scatter_adds_in_the_order_of_ranks(pool, world):
    """Bitwise, and in place: so a result does not depend on where the parts are cut."""
    expected = sum(torch.randn(world, 1001, generator=torch.Generator().manual_seed(r)) for r in range(world))
    assert torch.equal(torch.stack(pool.run(world, scatter_rough_numbers)), expected)


@pytest.mark.parametrize("world", few_of(WORLDS, SHOWN.__contains__))
def test_sums_over_a_narrow_wire_round_each_part_once_and_add_wide(pool, world):
    for dtype, reduce_dtype in REDUCE_DTYPES:
        item = reduce_dtype.itemsize
        sent = (world - 1) * ODD * item, 3 * (2 * (world - 1) * ODD * item // world)
        assert pool.run(world, sum_over_a_narrow_wire, dtype, reduce_dtype) == [sent] * world


@pytest.mark.parametrize("world", few_of([2, 3, 4], (3).__eq__))
def test_ledger_equals_theory(pool, world):
    full = 96 * 4
    others = (world - 1) * full // world
    expected = {"all_reduce": 2 * others, "all_gather": others, "reduce_scatter": others, "all_to_all": others}
    for rank, (carried, totals) in enumerate(pool.run(world, read_ledger)):
        broadcast = full if rank == 0 else 0
        assert carried == {"dp": {name: (1, sent) for name, sent in (expected | {"broadcast": broadcast}).items()}}
        assert totals == {"dp": {"calls": 5, "bytes": 5 * others + broadcast}}


def test_one_rank_sends_nothing(pool):
    assert pool.run(1, read_ledger) == [({}, {})]


@pytest.mark.parametrize(
    ("degrees", "num_groups"),
    [({"dp": 4}, 1), ({"dp": 2, "tp": 2}, 3), ({"pp": 2, "dp": 2, "ep": 2}, 3), ({"cp": 4, "ep": 2}, 3)],
)
def test_axes_reduce_over_their_ranks_and_share_groups(pool, degrees, num_groups):
    topology = Topology(**degrees)
    for rank, (sums, groups) in enumerate(pool.run(4, reduce_on_every_axis, degrees)):
        assert sums == {name: sum(topology.ranks(name, rank)) for name in AXIS_NAMES}
        assert groups == num_groups
