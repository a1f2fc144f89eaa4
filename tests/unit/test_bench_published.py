"""scripts/bench/published.py: halves that measurements do not choose, a row of each source, fitted constants that have names."""

from dataclasses import asdict, replace

import pytest

from scripts.bench.published import CHOSEN, HALVES, Run, candidate_of, forecast, read_shape, summarize
from scripts.bench.systems import FITTED, UNFITTED, UNITS, find_system

ROWS = {
    "Megatron-Bridge": "Megatron-Bridge,26.06,Pre-Training,LLAMA3_8B,,DGX-H100,8,BF16,128,1,8192,0,1,1,2,n/a,n/a",
    "llm-foundry": "llm-foundry,2024,,MPT-1b,Activation Checkpointing=False,h100_80gb,8,bf16,128,16,2048,,1,1,1,,",
    "Automodel": "Automodel,2026-08 docs,Pre-Training,GPT-OSS 20B,DeepEP,DGX-H100,8,BF16,256,2,4096,8,1,1,1,-,-",
}


def make_run(source: str, printed: float = 1.0) -> Run:
    return Run(dict(zip(CHOSEN, ROWS[source].split(","), strict=True)), printed, 1.0)


@pytest.mark.parametrize("source", ROWS)
def test_a_row_of_each_source_is_forecast(source):
    found = forecast(make_run(source))
    assert found.step_s > 0
    assert 1e3 < found.tokens_per_s_and_rank < 1e5


@pytest.mark.parametrize("source", ROWS)
def test_what_was_measured_does_not_choose_the_half(source):
    assert make_run(source, 1.0).half == make_run(source, 9.0).half
    assert make_run(source).half in HALVES


def test_experts_of_automodel_lie_on_all_ranks_where_its_table_has_no_number():
    run = make_run("Automodel")
    shape = read_shape(run.cells["model"], 4096, False)
    assert candidate_of(run, find_system(run.cells), shape.num_layers).ep == 8


def test_every_fitted_constant_has_a_meaning_and_counts_only_where_it_is_named():
    assert set(asdict(FITTED)) == set(UNITS)
    dense = make_run("Megatron-Bridge")
    assert forecast(dense).step_s == forecast(dense, UNFITTED).step_s
    foundry = make_run("llm-foundry")
    assert forecast(foundry, replace(FITTED, foundry_h100=0.5)).step_s > forecast(foundry).step_s


def test_halves_are_summarized_apart():
    runs = [make_run(source) for source in ROWS]
    lines = summarize([(run, 0.1) for run in runs])
    for run in runs:
        assert lines[run.cells["source"]] == dict.fromkeys(("all", run.half), (1, 0.1, 0.1, 0.1))
