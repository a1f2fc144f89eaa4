"""An object store that processes share, without a server: objects are files that appear as a whole, by a rename."""

import os

import fsspec
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

PROTOCOL = "shared"


class SharedStore(LocalFileSystem):
    """`shared:///path/of/an/object`."""

    protocol = (PROTOCOL,)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(os.fspath(path).removeprefix(f"{PROTOCOL}://"))

    def _open(self, path, mode="rb", block_size=None, **more):
        if "w" not in mode:
            return super()._open(path, mode, block_size, **more)
        self.makedirs(self._parent(path), exist_ok=True)
        return Put(path, mode, fs=self, autocommit=False)


class Put(LocalFileOpener):
    """A file that has its name once it is closed."""

    def __exit__(self, *error):
        self.close()

    def close(self):
        super().close()
        self.commit()


def register():
    """Have fsspec know it, in this process and those that it forks."""
    fsspec.register_implementation(PROTOCOL, SharedStore, clobber=True)
