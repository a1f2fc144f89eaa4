"""Linear layers that multiply fp8 numbers (`precision.compute=fp8`): those of decoder layers that are trained and that kernels
take. Embedding, head, routers, stacked experts, norms and attention stay bf16, and so do recurrent mixers (state-space models,
linear attention with a convolution): their code and their fused kernels read weights without calling the layers that hold them.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from framework.errors import ModelError
from framework.mesh.layout import Layout
from framework.model.load import kept_in_fp32
from framework.model.matmul import Matmul, MatmulLinear
from framework.model.routers import find_routers
from framework.parallel.stage_plan import StagePlan
from framework.recipe.schema import Precision

# Rows and columns of a weight that fp8 kernels take are multiples of it.
ALIGNMENT = 16


def require_torchao() -> None:
    """Raises ModelError where it is not installed."""
    if find_spec("torchao") is None:
        raise ModelError(
            "precision.compute=fp8: torchao is not installed: pip install 'meshwright[fp8]'; or precision.compute=bf16"
        )


def gather_in_fp8(model: PreTrainedModel, layouts: Mapping[str, Layout], plan: StagePlan) -> Mapping[str, Layout]:
    """Where ZeRO unshards weights for each use (stage 3), those that are multiplied in fp8 with one scale each travel so. The
    model stays. Raises ModelError where the recipe asks for fp8 and the model cannot have it."""
    if plan.recipe.precision.compute != "fp8":
        return layouts
    found = find_fp8_linears(model, plan)
    wide = kept_in_fp32(model, plan.compute_dtype)
    kept = [name for name in found if f"{name}.weight" in wide]
    if kept:
        raise ModelError(
            f"precision.compute=fp8: {model.config.model_type} keeps linear layers in fp32 ({', '.join(kept[:3])}), which fp8"
            " would undo: precision.compute=bf16"
        )
    if plan.recipe.zero.stage < 3 or plan.recipe.precision.fp8_scaling != "tensor":
        return layouts
    weights = {f"{name}.weight" for name in found}
    return {name: replace(layout, gathered_in="fp8") if name in weights else layout for name, layout in layouts.items()}


def find_fp8_linears(model: PreTrainedModel, plan: StagePlan) -> dict[str, nn.Module]:
    """The linear modules that multiply fp8 numbers, by name."""
    if plan.recipe.precision.compute != "fp8":
        return {}
    others = {id(part) for router, _ in find_routers(model) for part in router.modules()}
    others |= {id(part) for mixer in model.modules() if _is_recurrent(mixer) for part in mixer.modules()}
    roots = [unit.root for unit in plan.own_units if unit.is_layer]
    return {
        f"{root}.{name}": module
        for root in roots
        for name, module in model.get_submodule(root).named_modules()
        if (isinstance(module, MatmulLinear) or type(module) in (nn.Linear, Conv1D))
        and id(module) not in others
        and f"{root}.{name}.weight" in plan.groups
        and all(size % ALIGNMENT == 0 for size in module.weight.shape)
    }


def _is_recurrent(module: nn.Module) -> bool:
    """Whether this is a mixer with a state: it has a decay of its own, or a convolution over tokens."""
    has_decay = any("A_log" in name for name, _ in module.named_parameters(recurse=False))
    return has_decay or any(isinstance(part, nn.Conv1d) for part in module.children())


def emulates_fp8(precision: Precision, device: torch.device) -> bool:
    """Whether fp8 is asked for of a device that does not multiply it."""
    if precision.compute != "fp8":
        return False
    # torchao is an optional dependency, and takes two seconds to import.
    from framework.model.fp8 import has_kernel

    return not has_kernel(device, precision.fp8_scaling)


def make_matmul(module: nn.Module, is_transposed: bool, fp8: set[nn.Module], plan: StagePlan) -> Matmul:
    """The matmuls of a linear module: in fp8 if it is one of those."""
    if module not in fp8:
        return Matmul(module, is_transposed)
    require_torchao()
    from framework.model.fp8 import Fp8Matmul

    return Fp8Matmul(module, is_transposed, plan.recipe.precision.fp8_scaling)
