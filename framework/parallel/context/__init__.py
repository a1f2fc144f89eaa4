"""Context parallelism: the tokens of every sequence are divided over the ranks of `cp`."""

from framework.parallel.context.attention import ContextAttention
from framework.parallel.context.probe import refuse_undivided_context
from framework.parallel.context.split import split_context

__all__ = ["ContextAttention", "refuse_undivided_context", "split_context"]
