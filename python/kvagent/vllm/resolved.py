"""The canonical form of what vLLM resolved and of the environment: everything but what the table
harmless.txt says.

Equal forms mean equal values: each value stands with its type, in a form that no other value has.
A text that names a file or a folder counts with its content, and code that belongs neither to vLLM
nor to the libraries that it comes with counts with its source. A value without such a form is
unknown: its engine shares with no other.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import importlib.util
import json
import logging
import os
import re
import sys
import types
from collections.abc import Mapping
from fnmatch import translate
from importlib.metadata import entry_points
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from kvagent import files
from kvagent.files import Unreadable

if TYPE_CHECKING:
    from collections.abc import Iterable

PLUGINS = ("vllm.platform_plugins", "vllm.general_plugins")
"""The entry points that vLLM loads in every process of an engine."""
OWN = "kvagent"
_DEEP = 100  # levels of values within values
_LONG = 4096  # characters of a path

log = logging.getLogger("vllm.kvagent")

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
def harmless() -> dict[str, str]:
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
    return tuple(name.removeprefix(_ENVIRONMENT) for name in harmless() if name.startswith(_ENVIRONMENT))


@functools.cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, names)))


class Forms:
    """Makes forms. ``unknown`` has the paths of the values that have none.

    ``since_ns``: a file that changed since then may have been read before it changed.
    """

    def __init__(self, since_ns: int | None) -> None:
        self.unknown: list[str] = []
        self._since = since_ns
        self._open: list[int] = []
        """The objects around the one whose form is being made."""

    def sections(self, config: Any) -> dict[str, str]:
        """Return a digest of each part of vLLM's configuration, by name; ``vllm_config`` is of what
        is in no part.
        """
        forms = {name: (value, self.of(value, name)) for name, value in _members(config)}
        parts = {name for name, (value, form) in forms.items() if dataclasses.is_dataclass(value) and form is not None}
        rest = {name: form for name, (_, form) in forms.items() if name not in parts and form is not None}
        return {name: digest(forms[name][1], name) for name in parts} | {"vllm_config": digest(rest, "vllm_config")}

    def environment(self) -> str:
        """Return the digest of the variables that count; of those that vLLM declares, as it reads
        them.
        """
        declared = _declared()
        plugins = tuple(sorted({package for package, _ in _plugins()}))
        forms = {
            name: self.of(value, name) for name, value in os.environ.items()
            if name not in declared and variable_counts(name, plugins)
        }  # fmt: skip
        for name, read in declared.items():
            if not harmless_variable(name):
                try:
                    forms[name] = self.of(read(), name)
                except Exception:  # noqa: BLE001  vLLM's own reader, which refuses some values
                    forms[name] = self.of(os.environ.get(name), name)
        return digest(forms, "environment")

    def code(self, architectures: Iterable[str]) -> str:
        """Return the digest of the code from elsewhere: vLLM's plugins, the classes of the model
        that are not vLLM's, and what the model's authors sent along.
        """
        forms: list[Any] = [self._source(package, f"plugin {name}") for package, name in sorted(_plugins())]
        forms += [self._class_of(name) for name in sorted(architectures)]
        remote = {
            hashlib.sha256(Path(file).read_bytes()).hexdigest()
            for name, module in list(sys.modules.items())
            if name.startswith("transformers_modules.") and (file := getattr(module, "__file__", None))
        }
        return digest([*forms, *sorted(remote)], "code")

    def of(self, value: Any, path: str, field: str = "") -> Any:
        """Return the form of a value, which JSON knows.

        ``path`` names the value, ``field`` the field whose dict may have harmless keys. None if it
        is None, or an object of which nothing counts.
        """
        if value is None:
            return None
        kind = type(value)
        if kind in (bool, int, float, bytes, complex, range):
            return [kind.__name__, repr(value)]
        if kind is str:
            return self._of_text(value, path)
        if id(value) in self._open:
            return ["again", self._open[::-1].index(id(value))]
        if len(self._open) > _DEEP:
            return self._unknown(path, "is too deep")
        self._open.append(id(value))
        try:
            return self._of_object(value, kind, path, field)
        finally:
            self._open.pop()

    def _of_object(self, value: Any, kind: type, path: str, field: str) -> Any:
        if isinstance(value, enum.Enum):
            return ["enum", self._code(kind, path), value.name, self.of(value.value, path)]
        if isinstance(value, PurePath):
            return self._of_text(str(value), path)
        if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            return ["code", self._code(value, path)]
        if _top(kind.__module__) in ("numpy", "torch"):
            return self._of_number(value, kind, path)
        if isinstance(value, Mapping) and _top(kind.__module__) in _SHIPPED:
            counted = [item for item in value.items() if f"{field}.{item[0]}" not in harmless()]
            return ["map", _sorted([self.of(key, path), self.of(one, f"{path}.{key}")] for key, one in counted)]
        if kind in (list, tuple):  # vLLM caches some as JSON, which knows no tuples
            return ["list", [self.of(one, f"{path}[{i}]") for i, one in enumerate(value)]]
        if kind in (set, frozenset):
            return ["set", _sorted(self.of(one, path) for one in value)]
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return [self._code(kind, path), [self.of(one, f"{path}.{i}") for i, one in enumerate(value)]]
        if isinstance(value, functools.partial):
            return ["partial", *(self.of(one, path) for one in (value.func, value.args, value.keywords))]
        if _is_record(kind):
            members = [
                (name, self.of(one, f"{path}.{name}", f"{kind.__name__}.{name}")) for name, one in _members(value)
            ]
            counted = [(name, form) for name, form in members if form is not None]
            return [self._code(kind, path), counted] if counted or not _in_table(kind) else None
        return self._unknown(path, f"is of {kind.__module__}.{kind.__qualname__}")

    def _of_number(self, value: Any, kind: type, path: str) -> Any:
        """Return the form of what numpy and torch have in place of numbers and types."""
        if kind.__name__ == "device":
            return ["torch.device", value.type]  # which one of a kind is another thing in each worker
        if kind.__name__ in ("dtype", "layout", "memory_format", "Size") or kind.__name__.endswith("DType"):
            return [kind.__name__, str(value)]
        if hasattr(value, "tobytes") and not value.dtype.hasobject:
            return [kind.__name__, value.dtype.str, list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
        return self._unknown(path, f"is of {kind.__module__}.{kind.__qualname__}")

    def _unknown(self, path: str, why: str) -> str:
        self.unknown.append(f"{path} {why}")
        return f"unknown {path}"

    def _of_text(self, text: str, path: str) -> list[str]:
        """Return the form of a text, with the content of files and folders in place of their names,
        and with the source of the module whose attribute it names.
        """
        if not 0 < len(text) <= _LONG:
            return ["str", text]
        if _names_files(Path(text)):
            return ["files", self._digest(Path(text), path)]
        found = re.sub(
            r"/[^:,;\s]+", lambda one: self._digest(Path(one[0]), path) if _names_files(Path(one[0])) else one[0], text
        )
        module = re.split("[:.][A-Za-z_0-9]+$", text)[0]
        return ["str", found, self._source(module, path) if module != text and module in sys.modules else ""]

    def _digest(self, place: Path, path: str, *, new: bool = False) -> str:
        """Return the digest of files; ``new``: they were written as they were read."""
        try:
            return files.digest(files.files(place, every=True), [], None if new else self._since)
        except (Unreadable, OSError) as error:
            return self._unknown(path, f"names {place}: {error}")

    def _code(self, value: Any, path: str) -> Any:
        """Return the form of a class or function: its name, and its source unless vLLM comes with
        it.
        """
        module, name = str(getattr(value, "__module__", "")), str(value.__qualname__)
        if not isinstance(value, types.FunctionType):
            return [module, name, self._source(module, path)]
        if "<" in name and _top(module) not in _SHIPPED:
            return self._unknown(path, f"is a function whose name, {module}.{name}, does not determine it")
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        held = self.of([cells, value.__defaults__, value.__kwdefaults__], path)
        return [module, name, self._source(module, path), held]

    def _source(self, module: str, path: str) -> str:
        """Return the digest of the files of a module's package; empty if vLLM comes with it."""
        top = _top(module)
        if top in _SHIPPED or top == OWN:
            return ""
        here = getattr(sys.modules.get(module), "__file__", None)
        if top == "transformers_modules" and here:
            return self._digest(Path(here).parent, path, new=True)
        try:
            spec = None if top == "__main__" else importlib.util.find_spec(top)
        except (ImportError, ValueError):
            spec = None
        places = [*(spec.submodule_search_locations or ()), spec.origin] if spec is not None else [here]
        found = [Path(place) for place in places if place and _names_files(Path(place))]
        if not found:
            return self._unknown(path, f"is of {module}, whose source is not here")
        return self._digest(found[0], path)

    def _class_of(self, architecture: str) -> list[str]:
        """Return the form of the class that vLLM runs for an architecture."""
        from vllm import ModelRegistry

        one = ModelRegistry.models.get(architecture)
        module = getattr(one, "module_name", None) or getattr(getattr(one, "model_cls", None), "__module__", "vllm")
        return [architecture, self._source(str(module), f"the class of {architecture}")]


def digest(form: Any, name: str) -> str:
    """Return the digest of a form, and log the form."""
    text = json.dumps(form, sort_keys=True)
    log.debug("what counts of %s: %s", name, text)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


_SHIPPED = frozenset({"vllm", "torch", "transformers", "numpy", *sys.stdlib_module_names}) - {"__main__"}
"""Packages of which vLLM's version, which counts, says enough."""


def _sorted(forms: Iterable[Any]) -> list[Any]:
    return sorted(forms, key=json.dumps)


def _members(value: Any) -> list[tuple[str, Any]]:
    """Return what counts of an object: fields and other attributes, without what was computed of
    them.
    """
    kind = type(value)
    names = {field.name for field in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else set()
    return [
        (name, getattr(value, name, None))
        for name in sorted(names | set(getattr(value, "__dict__", ())))
        if not isinstance(getattr(kind, name, None), functools.cached_property)
        and not any(f"{one.__name__}.{name}" in harmless() for one in kind.__mro__)
    ]


def _is_record(kind: type) -> bool:
    """Return whether fields and attributes are all that there is of a class's objects."""
    bases = kind.__mro__[:-1]
    if any(one.__module__ == "builtins" for one in bases):
        return False
    return (
        dataclasses.is_dataclass(kind)
        or kind is types.SimpleNamespace
        or any(_top(one.__module__) == "transformers" for one in bases)
        or _top(kind.__module__) == "vllm"
    ) and (dataclasses.is_dataclass(kind) or "__dict__" in dir(kind))


def _in_table(kind: type) -> bool:
    return any(name.startswith(f"{one.__name__}.") for one in kind.__mro__ for name in harmless())


def _names_files(place: Path) -> bool:
    """Return whether there is such a file, or a folder whose name is no single word."""
    try:
        return place.is_file() or ("/" in str(place) and place.is_dir())
    except (OSError, ValueError):
        return False


def _plugins() -> set[tuple[str, str]]:
    """Return the packages of vLLM's plugins that it loads, each with a plugin's name."""
    allowed = os.environ.get("VLLM_PLUGINS")
    return {
        (_top(one.module), one.name)
        for group in PLUGINS for one in entry_points(group=group)
        if _top(one.module) not in ("vllm", OWN) and (allowed is None or one.name in allowed.split(","))
    }  # fmt: skip


def _declared() -> Mapping[str, Any]:
    try:
        from vllm import envs
    except ImportError:
        return {}
    declared: Mapping[str, Any] = getattr(envs, "environment_variables", {})
    return declared


def _top(module: str) -> str:
    return module.partition(".")[0]
