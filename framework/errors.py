"""Typed errors. The message of a user's mistake has what was found, why it cannot work and how to fix it. `exit_code` tells a
launcher what to do next: 0 done; 85 saved, run me again; 86 the user's mistake, do not retry; 87 bad node; 88 numerics; 89 out
of memory."""

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_RESUME = 85
EXIT_USER = 86
EXIT_NODE = 87
EXIT_NUMERICS = 88
EXIT_MEMORY = 89
# The exit code by which a shell reports a program that Ctrl-C ended: 128 + SIGINT.
EXIT_INTERRUPTED = 130


class MeshwrightError(Exception):
    """Any error that Meshwright explains; printed without a traceback."""

    exit_code = EXIT_USER


class RecipeError(MeshwrightError):
    """The recipe cannot be run: unknown key, wrong type, wrong range, contradiction."""


class TopologyError(MeshwrightError):
    """The degrees do not fit the world, or the model does not divide by them."""


class ConnectionFailed(MeshwrightError):
    """The ranks did not find or reach one another. Another attempt, perhaps on other nodes, may succeed."""

    exit_code = EXIT_FAILED


class HungError(MeshwrightError):
    """A step did not end: this rank waited for others, or for something else, and was ended. Another attempt may succeed."""

    exit_code = EXIT_FAILED


class RanksDiffer(MeshwrightError):
    """Ranks of one run were started with different recipes, code, libraries or devices."""


class NodeError(MeshwrightError):
    """This machine cannot do its part: another one may."""

    exit_code = EXIT_NODE


class LayoutError(MeshwrightError):
    """A tensor cannot be laid out as asked."""


class ScheduleError(MeshwrightError):
    """A pipeline schedule is incomplete, out of order, or waits for itself."""


class OrderError(MeshwrightError):
    """Ranks are about to start different collectives (track.debug_collectives)."""


class ModelError(MeshwrightError):
    """The model or its weights cannot be built, recognised or loaded."""


class DataError(MeshwrightError):
    """A source, a record or a token store cannot be used."""


class DamagedStore(DataError):
    """A file of a token store, or of its tokenizer, is not what was written there."""


class CheckpointError(MeshwrightError):
    """A checkpoint is missing, damaged, or of another run."""


class StorageError(MeshwrightError):
    """The file system failed and went on failing when tried again. Another attempt, perhaps on other nodes, may succeed."""

    exit_code = EXIT_FAILED


class OffloadError(MeshwrightError):
    """The folder of memory.offload.disk_path cannot hold the states: no room, no right to write, no disk."""


class RunError(MeshwrightError):
    """The run directory cannot be used: in use by another process, not writable, finished."""


class RunInUse(RunError):
    """Ranks of an earlier start still hold the run. They are about to end, so another attempt may succeed."""

    exit_code = EXIT_FAILED


class LeaseLost(RunError):
    """Another start has taken the run, because this one was thought dead. The run goes on there, so the exit code is one that
    is not tried again and leaves no node out."""


class DriftError(MeshwrightError):
    """Ranks hold different values of what they should hold alike. The run goes on from a checkpoint from before that."""

    exit_code = EXIT_FAILED


class NumericsError(MeshwrightError):
    """Training left the finite numbers."""

    exit_code = EXIT_NUMERICS


class OutOfMemory(MeshwrightError):
    """A device, or the host, has no memory for what the layout needs."""

    exit_code = EXIT_MEMORY
