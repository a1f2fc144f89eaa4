"""A pipeline schedule, `pipeline.schedule=eager_1f1b`: 1F1B with one more forward ahead, under which messages may hide.

Each rank's list is written without the others; that they fit together is proved before anything runs.
"""

from framework.extend import pipeline_schedule
from framework.parallel.pipeline.simulate import B, F


@pipeline_schedule("eager_1f1b")
def eager_1f1b(rank, num_ranks, num_microbatches, writer):
    """The actions of a rank: twice as many forwards ahead of the first backward as 1F1B has."""
    ahead = min(2 * (num_ranks - 1 - rank), num_microbatches)
    for _ in range(ahead):
        writer.write(0, F)
    for _ in range(num_microbatches - ahead):
        writer.write(0, F, B)
    for _ in range(ahead):
        writer.write(0, B)
