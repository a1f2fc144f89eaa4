"""Collectives of Python objects, named as torch's: broadcast, scatter and gather; errors that one rank raises on all; and a
board, on which ranks leave notes for one another.

What every rank would read from a file system or a hub by itself, rank 0 reads: thousands of ranks that ask for the same file
are a load of their own, and two of them may see different answers (NFS caches attributes for seconds). An all-gather of objects
would send n answers to each of n ranks; here n answers go to one rank, or one answer goes to all.

The axis must carry tensors of the CPU, as `world` does on every backend.

A board is where ranks write what they do and read what others wrote, in the store where they met: beside training, and also when
training hangs.

    every beat     each rank      set its line, is there an alarm?            2 small questions, whatever the world's size
                   rank 0         read all lines                              1 question
    an alarm       each rank      set its answer                              then one rank reads all, and writes the verdict

Nothing there waits for a rank: what is not there is None. A question does wait for who hosts the store (`open_store_beside`).

Objects and words travel with a seal that only ranks of this run can make. Reading a pickle executes what its writer wants, and
whoever reaches a port of the store may write there, other addresses of ranks included. So what arrives is compared with its
seal before it is read. secret: of the run's start, as the launcher has given it to each rank (`connect.read_secret`); empty
where ranks are one another's children and meet in a private folder.
"""

import hmac
import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from framework.comm.collectives import all_reduce, check_agreement
from framework.comm.communicator import Communicator
from framework.errors import EXIT_USER, ConnectionFailed, MeshwrightError
from framework.torch_private import carries_cpu_tensors

T = TypeVar("T")

# Apart from the tags of `algorithms` and `collectives`.
OBJECTS_TAG = 4


def broadcast_object(work: Callable[[], T], axis: Communicator, source: int = 0) -> T:
    """Broadcast the result of `work`, which the rank at index `source` alone does, or raise its MeshwrightError on all ranks.
    Collective. The result must be picklable. Bytes: the sealed pickle, sent by the source to each of the others.
    """
    # Errors that are not ours end rank 0 with its own traceback, and the others by their group's timeout or the launcher.
    outcome: T | MeshwrightError | None = None
    if axis.rank == source:
        try:
            outcome = work()
        except MeshwrightError as error:
            outcome = error
    if axis.size > 1:
        outcome = _broadcast(outcome, source, axis)
    if isinstance(outcome, MeshwrightError):
        raise outcome
    return outcome  # type: ignore[return-value]  # what `work` has returned on the source


def share_errors(work: Callable[[], T], axis: Communicator) -> T:
    """This rank's own result of `work`, which every rank of the axis does; where it is a MeshwrightError on one, that error
    is raised on all of them. Collective: one integer is reduced, and an error broadcast.

    Of several errors the user's comes first, which another start would meet again; of alike ones that of the lowest rank. Without
    it a rank that fails would leave while the others wait for it in the next collective.
    """
    result: T | None = None
    failure: MeshwrightError | None = None
    try:
        result = work()
    except MeshwrightError as error:
        failure = error
    # One number that orders errors by kind and then by rank, so that a single minimum finds the first and who has it.
    urgency = 2 if failure is None else int(failure.exit_code != EXIT_USER)
    first = torch.tensor(urgency * axis.size + axis.rank)
    all_reduce(first, axis, "min", label="share_errors")
    if first < 2 * axis.size:
        broadcast_object(lambda: _raise(failure), axis, source=int(first) % axis.size)
    return result  # type: ignore[return-value]  # no rank has failed


@torch.compiler.disable
def all_gather_object(obj: Any, axis: Communicator) -> list[Any]:
    """Every rank's picklable object, in the axis's order. For a few names and numbers, not for tensors.

    Bytes: this rank's object to each other rank. The axis must carry tensors of the CPU.
    """
    if axis.size == 1:
        return [obj]
    check_agreement(axis, "all_gather_object", "", None)
    mine = seal(obj, axis.secret)
    # Over NCCL alone the bytes go by way of the GPU.
    device = torch.device("cpu" if carries_cpu_tensors(axis.group) else "cuda")
    size = torch.tensor([len(mine)], device=device)
    sizes = [torch.empty_like(size) for _ in range(axis.size)]
    with axis.waiting(axis.record("all_gather_object", (axis.size - 1) * len(mine))):
        dist.all_gather(sizes, size, group=axis.group)
        lengths = [int(each) for each in sizes]
        # Sizes differ between ranks, and every object is padded to the largest: hence only for what is small.
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
        padded[: len(mine)] = mine
        gathered = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(gathered, padded, group=axis.group)
    return [unseal(each[:length].cpu(), axis.secret) for each, length in zip(gathered, lengths, strict=True)]


def gather_object(obj: Any, axis: Communicator) -> list[Any]:
    """Gather a picklable object of every rank on the axis's rank 0, in the axis's order; an empty list on the others. Collective.

    Bytes: this rank's object, sent once (rank 0 receives them all), and its size. `dist.gather_object` would tell every size to
    every rank and pad every object to the largest.
    """
    if axis.size == 1:
        return [obj]
    check_agreement(axis, "gather_object", "", None)
    mine = seal(obj, axis.secret)
    # Sizes first: rank 0 receives into memory of exactly each object's size, of which one may be thousands of times another.
    size = torch.tensor([len(mine)])
    sizes = [torch.zeros_like(size) for _ in range(axis.size)] if axis.rank == 0 else None
    with axis.waiting(axis.record("gather_object", size.nbytes + len(mine) if axis.rank else 0)):
        dist.gather(size, sizes, group=axis.group, group_dst=0)
        if sizes is None:
            axis.send(mine, 0, OBJECTS_TAG).wait()
            return []
        places = [torch.empty(int(each), dtype=torch.uint8) for each in sizes[1:]]
        # All at once: in turn, one slow rank would hold up the receives of those that are done.
        arriving = [axis.receive(place, rank, OBJECTS_TAG) for rank, place in enumerate(places, 1)]
        for work in arriving:
            work.wait()
    return [obj, *(unseal(place, axis.secret) for place in places)]


def gather_numbers(numbers: Sequence[float], axis: Communicator) -> list[list[float]]:
    """Gather equally many numbers of every rank on the axis's rank 0, in the axis's order; an empty list on the others.

    Collective: one gather of fp64, 8 bytes a number, by the host: the backend receives all of them, where `gather_object` would
    pickle and receive in Python for each rank, in every reported step.
    """
    if axis.size == 1:
        return [list(numbers)]
    check_agreement(axis, "gather_numbers", "", None)
    mine = torch.tensor(list(numbers), dtype=torch.float64)
    places = [torch.empty_like(mine) for _ in range(axis.size)] if axis.rank == 0 else None
    with axis.waiting(axis.record("gather_numbers", mine.nbytes if axis.rank else 0)):
        dist.gather(mine, places, group=axis.group, group_dst=0)
    return [place.tolist() for place in places or ()]


def scatter_object(work: Callable[[], Sequence[T]], axis: Communicator) -> T:
    """Scatter the result of `work`, which the axis's rank 0 alone does, or raise its MeshwrightError on all ranks. Collective.

    `work` returns one picklable item for each rank, in the axis's order, else AssertionError. Bytes: each rank's item,
    sent to it alone by rank 0, and its size.
    """
    items: list[T] = []
    # The outcome before the items: a rank that waits for an item would not hear of an error in making it.
    broadcast_object(lambda: items.extend(work()), axis)
    assert axis.rank or len(items) == axis.size, (len(items), axis.size)
    if axis.size == 1:
        return items[0]
    check_agreement(axis, "scatter_object", "", None)
    size = torch.zeros(1, dtype=torch.int64)
    if axis.rank:
        with axis.waiting(axis.record("scatter_object", 0)):
            dist.scatter(size, None, group=axis.group, group_src=0)
            mine = torch.empty(int(size), dtype=torch.uint8)
            axis.receive(mine, 0, OBJECTS_TAG).wait()
        return unseal(mine, axis.secret)
    packed = [seal(item, axis.secret) for item in items[1:]]
    with axis.waiting(axis.record("scatter_object", sum(each.nbytes + size.nbytes for each in packed))):
        dist.scatter(size, [size, *(torch.tensor([len(each)]) for each in packed)], group=axis.group, group_src=0)
        leaving = [axis.send(each, rank, OBJECTS_TAG) for rank, each in enumerate(packed, 1)]
        for sending in leaving:
            sending.wait()
    return items[0]


def _broadcast(obj: Any, source: int, axis: Communicator) -> Any:
    """The object of the rank at index `source`, on all ranks."""
    check_agreement(axis, "broadcast_object", "", None)
    sealed = seal(obj, axis.secret) if axis.rank == source else torch.empty(0, dtype=torch.uint8)
    size = torch.tensor([len(sealed)])
    with axis.waiting(axis.record("broadcast_object", len(sealed))):
        dist.broadcast(size, group=axis.group, group_src=source)
        if axis.rank != source:
            sealed = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(sealed, group=axis.group, group_src=source)
    return obj if axis.rank == source else unseal(sealed, axis.secret)


def _raise(error: MeshwrightError | None) -> None:
    assert error is not None, "only a rank that has failed raises its error"
    raise error


_DIGEST = "sha256"
SEAL_BYTES = 32


def seal(obj: Any, secret: bytes) -> Tensor:
    """A picklable object as uint8 [n]: its seal and its pickle."""
    pickled = pickle.dumps(obj)
    # A bytearray, because torch warns of tensors over memory that cannot be written to.
    return torch.frombuffer(bytearray(hmac.digest(secret, pickled, _DIGEST) + pickled), dtype=torch.uint8)


def unseal(data: Tensor, secret: bytes) -> Any:
    """The object. Raises ConnectionFailed where no rank of this run has sealed it."""
    content = data.numpy().data
    found, pickled = content[:SEAL_BYTES], content[SEAL_BYTES:]
    if not hmac.compare_digest(found, hmac.digest(secret, pickled, _DIGEST)):
        raise ConnectionFailed(
            f"a message of {len(data):,} bytes was not written by a rank of this run, and is not read: who else reaches the ports"
            " of its ranks? docs/reliability.md lists them"
        )
    return pickle.loads(pickled)


def seal_text(text: str, secret: bytes) -> str:
    """A text with its seal in front."""
    return f"{hmac.digest(secret, text.encode(), _DIGEST).hex()} {text}"


def unseal_text(sealed: bytes, secret: bytes) -> str | None:
    """The text; None where no rank of this run has sealed it."""
    found, _, text = sealed.partition(b" ")
    is_ours = hmac.compare_digest(found, hmac.digest(secret, text, _DIGEST).hex().encode())
    return text.decode() if is_ours else None


class Board:
    """The board of the ranks 0 .. world-1, for one thread of each. secret: of the run's start. All texts are sealed with it, and
    others are ignored: else any process that reaches the store could end all ranks with an alarm."""

    def __init__(self, store: dist.Store, rank: int, world: int, secret: bytes = b"") -> None:
        self._store, self._rank, self._world, self._secret = store, rank, world, secret
        self._known: set[str] = set()  # keys that were there once: they stay, and need not be asked for

    def write(self, text: str) -> None:
        """Replace this rank's line."""
        self._store.set(f"line {self._rank}", self._seal(text))

    def read(self, ranks: Sequence[int]) -> list[str | None]:
        """The lines of ranks; None of one that has written none."""
        return self._read([f"line {rank}" for rank in ranks])

    def sound_alarm(self, text: str) -> None:
        """Sound an alarm, unless another rank has."""
        self._store.compare_set("alarm", "", self._seal(text))

    def find_alarm(self) -> str | None:
        """The alarm that was sounded first."""
        return self._read(["alarm"])[0]

    def answer(self, text: str) -> None:
        """This rank's answer to the alarm, once."""
        self._store.set(f"answer {self._rank}", self._seal(text))
        self._store.add("answers", 1)

    def is_answered(self) -> bool:
        """Whether all ranks have."""
        return self._store.add("answers", 0) >= self._world

    def read_answers(self) -> list[str | None]:
        """The answers of all ranks."""
        return self._read([f"answer {rank}" for rank in range(self._world)])

    def claim(self) -> bool:
        """Whether this is the first rank that offers to write the verdict."""
        return self._store.add("judges", 1) == 1

    def conclude(self, text: str) -> None:
        """Write the verdict."""
        self._store.set("verdict", self._seal(text))

    def find_verdict(self) -> str | None:
        """The verdict that `conclude` wrote."""
        return self._read(["verdict"])[0]

    def _read(self, keys: Sequence[str]) -> list[str | None]:
        # `get` waits for a key that is not there, so one asks first: of all at once, as all are there but at the beginning.
        missing = [key for key in keys if key not in self._known]
        if len(missing) > 1 and self._store.check(missing):
            self._known.update(missing)
        else:
            self._known.update(key for key in missing if self._store.check([key]))
        there = [key for key in keys if key in self._known]
        values = dict(zip(there, self._store.multi_get(there), strict=True)) if there else {}
        return [unseal_text(values[key], self._secret) if key in values else None for key in keys]

    def _seal(self, text: str) -> str:
        return seal_text(text, self._secret)
