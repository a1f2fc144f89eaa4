"""A board on which ranks write what they do and read what others wrote, in the store where they met: beside training, and also
when training hangs.

    every beat     each rank      set its line, is there an alarm?            2 small questions, whatever the world's size
                   rank 0         read all lines                              1 question
    an alarm       each rank      set its answer                              then one rank reads all, and writes the verdict

Nothing here waits for a rank: what is not there is None. A question does wait for who hosts the store (`open_store_beside`).
"""

from collections.abc import Sequence

import torch.distributed as dist

from framework.comm.objects import seal_text, unseal_text


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
