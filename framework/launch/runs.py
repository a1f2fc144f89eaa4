"""The runs of a recipe: a folder, or a URL with the folder of their working folders."""

from dataclasses import dataclass
from pathlib import Path

from framework.checkpoint.storage import ObjectPath, Place, is_url, open_place, read
from framework.errors import RunError
from framework.launch.directory import RunDirectory
from framework.launch.places import explain_errors, refuse_unreachable, refuse_unwritable
from framework.launch.remote import URL_FILE, RemoteRun, locate
from framework.recipe.place_rules import RUN_ROOT
from framework.recipe.schema import Run


@dataclass(frozen=True)
class Runs:
    """folder: of the run directories. url: where the runs lie, None for runs that lie in `folder`."""

    folder: Path
    url: ObjectPath | None = None

    @classmethod
    def of(cls, run: Run) -> "Runs":
        """Those below run.root."""
        place = open_place(run.root, key=RUN_ROOT)
        return cls(place) if isinstance(place, Path) else cls(locate(place, run.work), place)

    @classmethod
    def beside(cls, run: RunDirectory) -> "Runs":
        """Those among which a run is."""
        remote = RemoteRun.of(run.path)
        return cls(run.path.parent, None if remote is None else remote.url.parent)

    def find(self, run_id: str) -> RunDirectory:
        """The run of an id, as its store has it; without a recipe where there is none. Makes no folder for a run that is not
        there."""
        run = RunDirectory(self.folder / run_id)
        if self.url is None:
            return run
        if (run.path / URL_FILE).exists():
            run.refresh()
        elif RemoteRun(run.path, self.url / run_id).list_starts():
            with explain_errors(run.path, "run.work"):
                RemoteRun.make(run.path, self.url / run_id)
            run.refresh()
        return run

    def list_ids(self) -> list[str]:
        """The ids of the runs that have begun; in a store of all that have a name there."""
        if self.url is not None:
            return sorted(read(self.url.list, self.url))
        return sorted(each.parent.name for each in self.folder.glob("*/recipe.yaml"))

    def next_id(self, name: str) -> str:
        return RunDirectory.next_id(self.folder, name, self.url)

    def create(self, run_id: str | None, name: str) -> RunDirectory:
        return RunDirectory.create(self.folder, run_id, name, self.url)

    def refuse_unwritable(self) -> None:
        """Raises RunError where no run can be made here: it tries, and leaves nothing."""
        if self.url is not None:
            refuse_unreachable(str(self.url), RUN_ROOT)
        refuse_unwritable(self.folder, RUN_ROOT if self.url is None else "run.work")


def find_run(name: str) -> Path:
    """The run directory that a user names: a folder as it is, a run's id in the default folder of runs, or the URL of a run or a
    sweep, whose files are fetched. Raises RunError where a URL has neither."""
    if is_url(name):
        root, _, run_id = name.rstrip("/").rpartition("/")
        run = Runs.of(Run(root=root)).find(run_id)
        if not run.recipe.is_file() and not run.members:
            raise RunError(f"{name} is not a run (nothing there is the record of a start). A run is named ROOT/RUN-ID")
        return run.path
    folder = Path(name)
    path = folder if folder.exists() or len(folder.parts) > 1 else Path(Run().root) / name
    RunDirectory(path).refresh()
    return path


def find_place(name: str) -> Place:
    """`find_run`, or what a URL names that is no run."""
    if is_url(name) and not RemoteRun(Path(), ObjectPath(name.rstrip("/"))).list_starts():
        return open_place(name)
    return find_run(name)


def find_running(name: str) -> Path:
    """`find_run` for who asks something of a run that runs. Raises RunError where it runs from another working folder:
    requests are files of that."""
    path = find_run(name)
    remote = RemoteRun.of(path)
    newest = remote.list_starts()[-1:] if remote else []
    if remote and newest and not newest[0].has_ended and newest[0].folder != remote.folder_name:
        raise RunError(f"{remote.url} runs elsewhere, as {newest[0].describe()}: ask there, by that folder")
    return path
