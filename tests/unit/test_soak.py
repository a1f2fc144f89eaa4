"""What scripts/soak.py draws, compares and prints; the soak itself is run by hand (docs/reliability.md)."""

import importlib.util
import json
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"


@pytest.fixture(scope="module")
def soak():
    spec = importlib.util.spec_from_file_location("soak", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_a_hundred_faults_have_all_kinds_about_as_often_as_their_weights_say(soak):
    drawn = soak.draw_kinds(100, seed=1)
    counts, total = Counter(drawn), sum(weight for weight, _ in soak.KINDS.values())
    assert len(drawn) == 100
    assert all(abs(counts[kind] - 100 * weight / total) < 1 for kind, (weight, _) in soak.KINDS.items())
    assert counts.keys() == soak.KINDS.keys()
    assert drawn == soak.draw_kinds(100, seed=1)
    assert drawn != soak.draw_kinds(100, seed=2)
    assert [len(soak.draw_kinds(number, seed=3)) for number in (1, 10, 23)] == [1, 10, 23]


def test_the_table_has_medians_and_worst_by_kind_the_slowest_first(soak):
    times = {"kill rank": [(3.0, 4.0), (5.0, 5.5), (10.0, 12.0)], "slow rank": [(0.5, 0.5)]}
    events = [
        soak.Event(0, kind, "", True, recovered_s=recovered, caught_up_s=caught_up)
        for kind, pairs in times.items()
        for recovered, caught_up in pairs
    ]
    lost = soak.Event(9, "lost node", "", True, problem="no new step")
    lines = soak.render(soak.Report(1, 5, [*reversed(events), lost])).splitlines()
    assert lines[0].startswith("| fault | times | median s | worst s |")
    assert lines[2:] == ["| kill rank | 3 | 5.0 | 10.0 | 5.5 | 12.0 |", "| slow rank | 1 | 0.5 | 0.5 | 0.5 | 0.5 |"]


class Desk:
    """Two runs whose curves, weights and ledgers are on the disk."""

    def __init__(self, place, soak):
        self.place, self.weights_of = place, {soak.RUN: {}, soak.REFERENCE: {}}

    def folder(self, run):
        return self.place / run

    def train_as(self, run, *overrides):
        pass

    def weights(self, run):
        return self.weights_of[run]


@pytest.fixture
def desk(soak, tmp_path):
    from framework.track.sample_ledger import FOLDER

    for run in (soak.RUN, soak.REFERENCE):
        (tmp_path / run / FOLDER).mkdir(parents=True)
        lines = [json.dumps({"step": step, "loss": 1.0 / step}) for step in (1, 2)]
        (tmp_path / run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        samples = list(range(2 * soak.PER_STEP))
        records = [{"start": 0, "cursor": 0}, {"start": 0, "samples": samples, "tokens": [f"{n:x}" for n in samples]}]
        (tmp_path / run / FOLDER / "dp-0.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return Desk(tmp_path, soak)


def test_runs_that_are_equal_have_nothing_to_say(soak, desk):
    assert soak.compare(desk, 2) == []


def test_a_loss_a_weight_or_a_sample_that_differs_is_a_violation(soak, desk):
    import torch

    desk.weights_of = {soak.RUN: {"w": torch.zeros(2)}, soak.REFERENCE: {"w": torch.tensor([0.0, 1e-30])}}
    [problem] = soak.compare(desk, 2)
    assert problem == "1 of 1 weights differ, such as w"
    metrics = desk.folder(soak.RUN) / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("0.5", "0.5000001"))
    ledger = desk.folder(soak.RUN) / "samples" / "dp-0.jsonl"
    ledger.write_text(ledger.read_text().replace('"7"', '"8"'))
    assert soak.compare(desk, 2) == [
        "1 of 2 losses differ or are missing, the first of step 2",
        "1 of 1 weights differ, such as w",
        "1 samples are of other tokens: 7",
    ]
    assert "lost" in soak.compare(desk, 3)[-2]


def test_an_elastic_run_may_differ_by_rounding_alone(soak, desk):
    import torch

    weights = torch.linspace(-1, 1, 100, dtype=torch.float64)
    for share, is_fine in ((0.5 * soak.PARITY, True), (2 * soak.PARITY, False)):
        desk.weights_of = {soak.RUN: {"w": weights * (1 + share)}, soak.REFERENCE: {"w": weights}}
        problems = soak.compare(desk, 2, soak.PARITY)
        assert problems == ([] if is_fine else ["1 of 1 weights differ, such as w"])
        assert "1 of 1 weights differ, such as w" in soak.compare(desk, 2)
    drawn = soak.draw_kinds(10, 1, soak.ELASTIC_KINDS)
    assert Counter(drawn)[soak.Soak.lost_node] == 4
