"""What `meshwright plan` is asked for beside its screen."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Wanted:
    """What is printed below the screen (ranks, layouts, schedule, options), and which files are written. overwrite: in
    place of files that are not ours, too."""

    ranks: bool = False
    layouts: bool = False
    schedule: bool = False
    options: bool = False
    schedule_to: Path | None = None
    html: Path | None = None
    png: Path | None = None
    overwrite: bool = False
