"""A schedule as a CSV file: one line a rank, one cell an action, such as 0F0,0F1,0B0,0B1; empty cells say nothing."""

import csv
from pathlib import Path

from framework.errors import ScheduleError
from framework.parallel.pipeline.actions import Schedule, parse_action
from framework.parallel.pipeline.simulate import validate


def write_table(path: Path, schedule: Schedule) -> None:
    """The file that `read_table` reads."""
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(schedule.actions)


def read_table(path: Path, num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule of a file, checked to be whole and to end. Raises ScheduleError, with the file and the place in it."""
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
    owners = {action.stage: rank for rank, actions in enumerate(lists) for action in actions}
    missing = set(range(max(owners) + 1)) - set(owners)
    if missing or len(owners) % num_ranks:
        gap = f"nothing of stage {min(missing)}" if missing else f"{len(owners)} stages for {num_ranks} ranks"
        raise ScheduleError(f"{path} has {gap}; stages are numbered from 0, equally many on each rank")
    ranks = tuple(owners[stage] for stage in range(len(owners)))
    schedule = Schedule(path.name, num_microbatches, ranks, tuple(lists))
    validate(schedule)
    return schedule
