"""What every rank of the pool needs, imported once in the process that the ranks are forked from.

Nothing here may start a thread: a forked process would not have it.
"""

import gc
import os

# Before torch is imported: it reads the number of threads then, and transformers whether it may call the hub.
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
import torch._dynamo  # by `torch.compiler.disable`, at the first forward
import transformers  # noqa: F401

import framework.verify.layout
import framework.verify.oracle  # noqa: F401

torch.set_num_threads(1)
# What libraries have made stays: the collection behind every body need not look through it.
gc.freeze()
