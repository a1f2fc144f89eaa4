"""Recurrent mixers whose sequences are divided over `cp`, or hold several documents.

`pieces` says which parts of a sequence a rank has, and brings what a part needs of those before it: a window of tokens, which is
all that a short convolution needs, and the state with which it begins. `delta_rule` and `state_space` are functions that take the
place of those which the family's own forward calls. `hook` puts them into a model, or libraries' kernels.
"""

from framework.parallel.attention.recurrent.hook import hook_mixer, hook_mixers
from framework.parallel.attention.recurrent.pieces import ONE_RANK, Pieces

__all__ = ["ONE_RANK", "Pieces", "hook_mixer", "hook_mixers"]
