"""Context parallelism: attention of sequences whose tokens are divided over `cp`.

`attention` is what a layer calls; `ulysses` exchanges heads for tokens, `ring` and `gather` bring keys and values, `blocks` says
which queries meet which keys, and `merge` makes one softmax of them.
"""
