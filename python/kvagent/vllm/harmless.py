"""The table of what cannot change a block's bytes, harmless.txt, and the variables of the
environment that may.

Importing it imports no vllm: classes are known by their names.
"""

from __future__ import annotations

import functools
import re
from fnmatch import translate
from pathlib import Path

_TABLE = Path(__file__).with_name("harmless.txt")
_ENVIRONMENT = "environment."  # the owner of variables

COUNTED = (
    "VLLM_*", "TORCH*", "PYTORCH_*", "CUDA_*", "CUBLAS*", "CUDNN_*", "CUTLASS_*", "CUTE_*", "NVIDIA_*", "NVTE_*",
    "NCCL_*", "TRITON_*", "FLASH*", "DG_*", "DEEP*", "TVM_*", "TILELANG_*", "HIP*", "HSA_*", "ROC*", "MIOPEN_*",
    "AITER_*", "TENSILE_*", "XPU_*", "ONEAPI_*", "SYCL_*", "IPEX_*", "ONEDNN_*", "DNNL_*", "MKL_*", "XLA_*", "TPU_*",
    "LIBTPU_*", "PJRT_*", "JAX_*", "ASCEND_*", "NPU_*", "HABANA_*", "PT_HPU_*", "NEURON_*", "BNB_*", "HF_*",
    "TRANSFORMERS_*", "SAFETENSORS_*", "LD_PRELOAD",
)  # fmt: skip
"""Patterns of the variables that a library that computes may read, and vLLM reads all that it
declares (envs.environment_variables). Plugins read those that begin with their package's name.
Other variables belong to the shell, the container or the user.
"""


@functools.cache
def fields() -> dict[str, str]:
    """Return the reason of each harmless name, by ``Class.field``, ``Class.field.key`` or
    ``environment.pattern``.
    """
    found: dict[str, str] = {}
    owner = reason = ""
    for line in _TABLE.read_text().splitlines():
        if line.startswith(" "):
            found |= {f"{owner}.{name}": reason for name in line.split()}
        elif line and not line.startswith("#"):
            owner, _, reason = line.partition(": ")
    return found


def variable_counts(name: str, plugins: tuple[str, ...] = ()) -> bool:
    """Return whether a variable of the environment that is set counts; ``plugins`` are the names of
    their packages.
    """
    patterns = (*COUNTED, *(f"{plugin.upper()}_*" for plugin in plugins))
    return bool(_pattern(patterns).match(name)) and not harmless_variable(name)


def harmless_variable(name: str) -> bool:
    """Return whether a variable is in the table."""
    return bool(_pattern(_variables()).match(name))


@functools.cache
def _variables() -> tuple[str, ...]:
    return tuple(name.removeprefix(_ENVIRONMENT) for name in fields() if name.startswith(_ENVIRONMENT))


@functools.cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, names)))
