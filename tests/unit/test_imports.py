"""While libraries load, the garbage collector pauses; behind it everything is as before, but that they are left alone."""

import gc
import subprocess
import sys

import pytest

from framework.imports import loading_libraries

# In an interpreter of its own, which has not loaded transformers.
PROGRAM = """
import gc
from contextlib import suppress
from framework.imports import loading_libraries
with suppress(KeyError), loading_libraries():
    raise KeyError
print(gc.isenabled(), gc.get_freeze_count())
with loading_libraries():
    print(gc.isenabled())
print(gc.isenabled(), gc.get_freeze_count() > 1000)
gc.disable()
with loading_libraries():
    pass
print(gc.isenabled())
"""


def test_the_collector_pauses_while_libraries_load():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "0", "False", "True", "True", "False"], done.stderr


def test_nothing_changes_once_they_are_there():
    pytest.importorskip("transformers")
    frozen = gc.get_freeze_count()
    with loading_libraries():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
