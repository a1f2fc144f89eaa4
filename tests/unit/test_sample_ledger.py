"""The ledger of samples: what is lost, repeated or of other tokens is found; rewinds are not mistaken for any of it."""

import numpy as np
import pytest
import torch

from framework.data.pack import Microbatch
from framework.track.sample_ledger import SampleLedger, find_ledger_problems, next_start, read_lineage

PER_STEP, DP = 4, 2


def rows_of(samples):
    tokens = torch.tensor([[10 * sample + place for place in range(5)] for sample in samples])
    return Microbatch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), None)


def train(folder, first, last, dp=DP, change=lambda samples: samples, stage=0):
    """A start of `dp` ranks from step `first` of the data to `last`; change: of what a rank reads in a step."""
    start = next_start(folder)
    for rank in range(dp):
        ledger = SampleLedger(folder, rank, stage)
        ledger.begin(start, first * PER_STEP)
        for step in range(first, last):
            samples = change(np.arange(step * PER_STEP + rank, (step + 1) * PER_STEP, dp))
            ledger.note(step * PER_STEP, samples, [rows_of([sample]) for sample in samples])


def test_a_run_that_was_rewound_and_divided_anew_has_read_every_sample_once(tmp_path):
    whole, run = tmp_path / "whole", tmp_path / "run"
    for folder in (whole, run):
        folder.mkdir()
    train(whole, 0, 10)
    train(run, 0, 5)
    train(run, 4, 7, dp=1)
    train(run, 3, 8, dp=4)  # an older checkpoint
    train(run, 8, 10)
    lineage = read_lineage(run)
    assert lineage.cursors == (0, 16, 12, 32)
    assert lineage.tokens == read_lineage(whole).tokens
    assert find_ledger_problems(lineage, 40, read_lineage(whole)) == []
    assert find_ledger_problems(lineage, 44) == ["4 samples are lost: 40, 41, 42, 43"]
    assert find_ledger_problems(lineage, 36) == ["4 samples are not of these steps: 36, 37, 38, 39"]


def test_a_branch_and_stages_of_a_run_lose_nothing_where_they_begin(tmp_path):
    train(tmp_path, 3, 6)  # a branch of a run's third step
    train(tmp_path, 5, 7)
    train(
        tmp_path, 0, 2, stage=7
    )  # data that begins anew; a damaged checkpoint has its start go back to the stage before
    assert find_ledger_problems(read_lineage(tmp_path), 8) == []
    train(tmp_path, 6, 7)
    assert find_ledger_problems(read_lineage(tmp_path), 28) == []
    train(tmp_path, 0, 3, stage=7)
    train(tmp_path, 2, 4, stage=7)
    assert read_lineage(tmp_path).cursors == (0, 0, 8)
    assert find_ledger_problems(read_lineage(tmp_path), 16) == []
    assert find_ledger_problems(read_lineage(tmp_path, stage=0), 28) == []
    assert find_ledger_problems(read_lineage(tmp_path, stage=0), 32) == ["4 samples are lost: 28, 29, 30, 31"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda samples: np.where(samples == 13, 12, samples), "1 samples are lost: 13"),
        (lambda samples: np.where(samples == 13, 12, samples), "1 samples are read more than once: 12"),
        (lambda samples: samples[samples != 9], "1 samples are lost: 9"),
        (lambda samples: np.where(samples < 4, samples + 100, samples), "4 samples are not of these steps: 100, 101"),
    ],
)
def test_what_is_lost_or_repeated_is_found(tmp_path, change, problem):
    train(tmp_path, 0, 6, change=change)
    assert any(found.startswith(problem) for found in find_ledger_problems(read_lineage(tmp_path), 24))


def test_other_tokens_under_the_same_number_are_found(tmp_path):
    for name, shift in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        ledger = SampleLedger(tmp_path / name, 0)
        ledger.begin(0, 0)
        ledger.note(0, np.arange(3), [rows_of([0, 1 + shift, 2])])
    first, second = (read_lineage(tmp_path / name) for name in "ab")
    assert find_ledger_problems(first, 3, first) == []
    assert find_ledger_problems(second, 3, first) == ["1 samples are of other tokens: 1"]


def test_a_line_that_was_torn_costs_nothing_else(tmp_path):
    train(tmp_path, 0, 2, dp=1)
    path = tmp_path / "samples" / "dp-0.jsonl"
    path.write_text(path.read_text() + '{"start": 0, "samp')
    train(tmp_path, 2, 4, dp=1)
    assert find_ledger_problems(read_lineage(tmp_path), 16) == []
