"""A disk that loses its power: of all that was written it keeps what was synced, and what it likes of the rest.

The real file system has everything. Beside it this notes what is durable: a file's bytes as they were at its last fsync, a
folder's names as they were at its last. Before each operation, and at the end, the disk could be in any of these states:

    nothing       only what was synced
    names         names reach the disk at once, as with a journal, and bytes only when synced: files that are empty or old
    removals      of names that were not synced the removals have reached the disk, and the additions have not
    bytes         bytes reach the disk at once, and names only when synced
"""

import os
import shutil
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

STATES = ("nothing", "names", "removals", "bytes")
OPERATIONS = ("fsync", "mkdir", "rename", "replace", "unlink", "rmdir")


class Disk:
    """What is durable of `root`, which is so at the beginning. lost_sync: the number of an fsync, from 0, that does nothing.

    synced: names of what was synced, in order. look: is called before every operation.
    """

    def __init__(self, root, look, lost_sync=None):
        self.root, self.synced = root, []
        self._look, self._lost_sync, self._is_looking = look, lost_sync, False
        self._names, self._bytes, self._held = {}, {}, {}
        for folder, _, files in os.walk(root):
            self._names[self._number(Path(folder))] = self._list(Path(folder))
            for file in files:
                path = Path(folder, file)
                self._bytes[self._number(path)] = path.read_bytes()

    @contextmanager
    def watching(self):
        """Watch this process's operations."""
        with ExitStack() as patches:
            for name in OPERATIONS:
                patches.enter_context(patch.object(os, name, self._watched(name, getattr(os, name))))
            yield self
        self._look_once()
        for descriptor in self._held.values():
            os.close(descriptor)

    def write_state(self, state, target):
        """Make `target` what the disk may hold now."""
        self._write_folder(state, self._number(self.root), target)

    def _watched(self, name, plain):
        def operate(*args, **named):
            if self._is_looking:
                return plain(*args, **named)
            self._look_once()
            return self._sync(args[0]) if name == "fsync" else plain(*args, **named)

        return operate

    def _look_once(self):
        """What looks uses the file system itself."""
        self._is_looking = True
        try:
            self._look()
        finally:
            self._is_looking = False

    def _sync(self, descriptor):
        place = Path(f"/proc/self/fd/{descriptor}").resolve()
        if not place.is_relative_to(self.root):
            return
        self.synced.append(place.name)
        if len(self.synced) - 1 == self._lost_sync:
            return
        if place.is_dir():
            self._names[self._number(place)] = self._list(place)
        else:
            self._bytes[self._number(place)] = place.read_bytes()

    def _list(self, folder):
        return {path.name: self._number(path) for path in folder.iterdir()}

    def _number(self, path):
        """The file's or folder's own number. It is held open, so that no other gets it."""
        number = path.stat().st_ino
        if number not in self._held:
            self._held[number] = os.open(path, os.O_RDONLY)
        return number

    def _path(self, number):
        return Path(f"/proc/self/fd/{self._held[number]}")

    def _write_folder(self, state, number, target):
        target.mkdir()
        durable, now = self._names.get(number, {}), self._live(number)
        names = {
            "nothing": durable,
            "names": now,
            "removals": {name: each for name, each in durable.items() if now.get(name) == each},
            "bytes": durable,
        }[state]
        for name, each in names.items():
            if self._path(each).is_dir():
                self._write_folder(state, each, target / name)
            else:
                shown = self._path(each).read_bytes() if state == "bytes" else self._bytes.get(each, b"")
                (target / name).write_bytes(shown)

    def _live(self, number):
        """A folder's names now; none of one that was removed."""
        with os.scandir(self._path(number)) as found:
            return {each.name: self._number(Path(self._path(number), each.name)) for each in found}


def fresh(path):
    """The path, where nothing is any more."""
    shutil.rmtree(path, ignore_errors=True)
    return path
