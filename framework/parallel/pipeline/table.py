"""Schedules as CSV files: a line for each rank, a cell for each action, such as 0F0,0F1,0B0,0B1. Empty cells are ignored."""

import csv
from pathlib import Path

from framework.errors import ScheduleError
from framework.parallel.pipeline.actions import Schedule, parse_action
from framework.parallel.pipeline.simulate import validate


def write_table(path: Path, schedule: Schedule) -> None:
    """Write the file that `read_table` reads."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(schedule.actions)


def read_table(path: Path, num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule of a file, checked to be complete and free of deadlock.

    Raises ScheduleError that names the file, and the line where one is wrong.
    """
    try:
        with path.open(newline="") as file:
            rows = [[cell for cell in row if cell.strip()] for row in csv.reader(file)]
    except OSError as error:
        raise ScheduleError(f"pipeline.table={path} cannot be read: {error}") from error
    rows = [row for row in rows if row]
    if len(rows) != num_ranks:
        raise ScheduleError(
            f"{path} has {len(rows)} lines with actions; parallel.pp={num_ranks} needs one for each rank"
        )
    lists = []
    for line, row in enumerate(rows, start=1):
        try:
            lists.append(tuple(parse_action(cell) for cell in row))
        except ScheduleError as error:
            raise ScheduleError(f"{path}, line {line}: {error}") from None
    # The table says which stages are where by itself: any placement may be tried, not only loop and V.
    owners = {action.stage: rank for rank, actions in enumerate(lists) for action in actions}
    missing = set(range(max(owners) + 1)) - set(owners)
    if missing or len(owners) % num_ranks:
        gap = f"nothing of stage {min(missing)}" if missing else f"{len(owners)} stages for {num_ranks} ranks"
        raise ScheduleError(f"{path} has {gap}; stages are numbered from 0, equally many on each rank")
    ranks = tuple(owners[stage] for stage in range(len(owners)))
    schedule = Schedule(path.name, num_microbatches, ranks, tuple(lists))
    validate(schedule)
    return schedule
