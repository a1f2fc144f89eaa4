"""Objects and words that ranks send one another, with a seal that only ranks of this run can make.

Reading a pickle executes what its writer wants, and whoever reaches a port of the store may write there, other addresses of ranks
included. So what arrives is compared with its seal before it is read. secret: of the run's start, as the launcher has given it to
each rank (`connect.read_secret`); empty where ranks are one another's children and meet in a private folder.
"""

import hmac
import pickle
from typing import Any

import torch
from torch import Tensor

from framework.errors import ConnectionFailed

_DIGEST = "sha256"
SEAL_BYTES = 32


def seal(obj: Any, secret: bytes) -> Tensor:
    """A picklable object as uint8 [n]: its seal and its pickle."""
    pickled = pickle.dumps(obj)
    # A bytearray, because torch warns of tensors over memory that cannot be written to.
    return torch.frombuffer(bytearray(hmac.digest(secret, pickled, _DIGEST) + pickled), dtype=torch.uint8)


def unseal(data: Tensor, secret: bytes) -> Any:
    """The object. Raises ConnectionFailed where no rank of this run has sealed it."""
    content = data.numpy().data
    found, pickled = content[:SEAL_BYTES], content[SEAL_BYTES:]
    if not hmac.compare_digest(found, hmac.digest(secret, pickled, _DIGEST)):
        raise ConnectionFailed(
            f"a message of {len(data):,} bytes was not written by a rank of this run, and is not read: who else reaches the ports"
            " of its ranks? docs/reliability.md lists them"
        )
    return pickle.loads(pickled)


def seal_text(text: str, secret: bytes) -> str:
    """A text with its seal in front."""
    return f"{hmac.digest(secret, text.encode(), _DIGEST).hex()} {text}"


def unseal_text(sealed: bytes, secret: bytes) -> str | None:
    """The text; None where no rank of this run has sealed it."""
    found, _, text = sealed.partition(b" ")
    is_ours = hmac.compare_digest(found, hmac.digest(secret, text, _DIGEST).hex().encode())
    return text.decode() if is_ours else None
