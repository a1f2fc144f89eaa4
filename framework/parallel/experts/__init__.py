"""Expert parallelism: experts of a layer on different ranks, tokens sent to them and back."""

from framework.parallel.experts.dispatch import report_dropped, write_stacked_gradients
from framework.parallel.experts.split import check_experts, divides_experts, split_experts

__all__ = ["check_experts", "divides_experts", "report_dropped", "split_experts", "write_stacked_gradients"]
