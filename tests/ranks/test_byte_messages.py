"""Long messages of bytes: of unequal lengths, among several ranks at once, in segments."""

import torch

from framework.comm.connect import connect
from framework.comm.p2p import pass_bytes
from framework.mesh.topology import Topology


def message(source, to, number):
    """uint8 [n], with n of its own; some are empty."""
    size = (source * 37 + to * 11 + number * 5) % 90
    return torch.arange(size).add(source * 7 + number).to(torch.uint8)


def body(rank, world, rendezvous, segment_bytes):
    """Two messages from every rank to every other: all that came, and the bytes that were counted."""
    axis = connect(Topology(dp=world), torch.device("cpu"), rendezvous, rank, timeout_s=60).axis("world")
    others = [other for other in range(world) if other != rank]
    sends = [(message(rank, to, number), to) for to in others for number in range(2)]
    places = [
        (torch.zeros_like(message(source, rank, number)), source, number) for source in others for number in range(2)
    ]
    pass_bytes(sends, [(place, source) for place, source, _ in places], axis, segment_bytes)
    right = all(torch.equal(place, message(source, rank, number)) for place, source, number in places)
    return right, axis.traffic.bytes["send bytes"] == sum(len(data) for data, _ in sends)


def test_all_bytes_come_whatever_the_segments(pool):
    for segment_bytes in (16, 1 << 20):
        assert pool.run(3, body, segment_bytes) == [(True, True)] * 3
