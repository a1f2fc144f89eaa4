"""Recurrent mixers whose sequences are divided over `cp`, or hold several documents.

`pieces` says which parts of a sequence a rank has, and brings what a part needs of those before it: a window of tokens, and the
state with which it begins. Each form of mixer is a file of functions that take the place of those which the family's own forward
calls: `convolution`, `delta_rule`. `hook` puts them into a model.
"""

from framework.parallel.attention.recurrent.hook import hook_mixer, hook_mixers
from framework.parallel.attention.recurrent.pieces import ONE_RANK, Pieces

__all__ = ["ONE_RANK", "Pieces", "hook_mixer", "hook_mixers"]
