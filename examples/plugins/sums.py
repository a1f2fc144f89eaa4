"""An evaluation task, `eval.tasks=[sums]`: which of four numbers is the sum of two?

A function makes the records; what is scored, and by which names, follows from their fields (docs/evaluation.md).
"""

from framework.extend import evaluation_task


@evaluation_task("sums")
def make_sums():
    """The records, the same ones at each call: the tokens of a task are kept under a hash of them."""
    for first in range(2, 6):
        for second in range(3, 8):
            choices = [f" {first + second + shift}" for shift in (-1, 0, 1, 10)]
            yield {"context": f"{first} + {second} =", "choices": choices, "answer": 1}
