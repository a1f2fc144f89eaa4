"""SharedExperts: experts of all tokens, computed while the routed experts' rows travel.

The model computes them in code of its own, in front of the routed experts or behind them. Where they stand behind, they are
computed early, from the mixture's input, and what the model asks for later is there already. Where they stand in front, they are
left alone.

During a forward the mixture's attribute of that name is shadowed by this object, in the module's own dict, which Python reads
before it asks for submodules: the module that it stands for keeps its place, its name and its hooks.
"""

from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

# Names of what a mixture computes for every token beside its routed experts.
NAMES = ("shared_experts", "shared_expert", "shared_mlp")


class SharedExperts:
    """Calls `module` when it is asked, unless what it is asked for has been computed ahead. name: its attribute's."""

    def __init__(self, module: nn.Module, name: str):
        self.module, self.name = module, name
        self._input: ref[Tensor] | None = None
        self._ahead: tuple[Tensor, Any] | None = None

    @torch.compiler.disable
    def enter(self, mixture: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A hook in front of the mixture: its input, [.., H], is what shared experts are computed from."""
        self._input = ref(args[0] if args else kwargs["hidden_states"])
        mixture.__dict__[self.name] = self

    @torch.compiler.disable
    def leave(self, mixture: nn.Module, args: Any, output: Any) -> None:
        """A hook behind the mixture, also where it has failed."""
        self._input = self._ahead = None
        mixture.__dict__.pop(self.name, None)

    def compute_ahead(self) -> None:
        """Compute them now, for the model to ask for them later."""
        x = None if self._input is None else self._input()
        if x is not None:
            self._ahead = x, self.module(x)

    @torch.compiler.disable
    def __call__(self, x: Tensor) -> Any:
        ahead, self._ahead = self._ahead, None
        return ahead[1] if ahead is not None and ahead[0] is x else self.module(x)


def stand_in(mixture: nn.Module, experts: str, width: int) -> SharedExperts | None:
    """Let the mixture's shared experts be computed ahead; None where it has none, or asks for them in front of the routed ones.

    mixture: on meta. experts: the name of its routed experts; width: H.
    """
    name = next((name for name in NAMES if name in mixture._modules), None)
    if name is None or not _asks_behind(mixture, name, experts, width):
        return None
    shared = SharedExperts(mixture.get_submodule(name), name)
    mixture.register_forward_pre_hook(shared.enter, with_kwargs=True)
    mixture.register_forward_hook(shared.leave, always_call=True)
    return shared


def _asks_behind(mixture: nn.Module, shared: str, experts: str, width: int) -> bool:
    """Whether the mixture's own code calls its shared experts once, behind the routed ones, with what it was given."""
    # Found by running it without memory: which comes first is in the code of each family, and may change with a version.
    x = torch.empty(1, 2, width, device="meta")
    calls: list[str] = []

    def compute_routed(hidden: Tensor, *routing: Tensor) -> Tensor:
        calls.append("routed")
        return hidden.clone()

    def compute_shared(given: Tensor) -> Tensor:
        calls.append("shared, of the input" if given is x else "shared")
        return given.clone()

    mixture.__dict__ |= {experts: compute_routed, shared: compute_shared}
    try:
        with torch.no_grad():
            mixture(x)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, NotImplementedError):
        return False  # it asks for more than hidden states: then they are computed where they stand
    finally:
        del mixture.__dict__[experts], mixture.__dict__[shared]
    return calls == ["routed", "shared, of the input"]
