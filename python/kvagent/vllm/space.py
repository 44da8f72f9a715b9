"""The identity of a space: everything besides the tokens that determines a block's bytes.

docs/vllm/identity.md says what counts. Both roles derive it from the same vLLM configuration. A
worker computes the blocks, so what it has counts; the scheduler supposes the same of its own copy,
asks vLLM which backends it would choose, and learns from the workers what they have (WorkerInfo).

Equal forms mean equal values: each value stands with its type, in a form that no other value has. A
value without a form is unknown: its engine shares with no other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import fnmatch
import functools
import hashlib
import importlib.util
import json
import logging
import multiprocessing
import os
import platform
import re
import sys
import time
import types
from collections.abc import Mapping
from fnmatch import translate
from importlib.metadata import entry_points
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from kvagent import files
from kvagent.files import Unreadable
from kvagent.registration import identity_pairs
from kvagent.vllm.geometry import STATE, WINDOW, WITHOUT_DRAFTS, group_spec, replicated
from kvagent.vllm.internals import cpu_isa
from kvagent.vllm.options import OptionError
from kvagent.vllm.weight_changes import LOADED, UNSHARED, of_engine, unobserved_changes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvagent.vllm.geometry import Ranks
    from kvagent.vllm.options import Options


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
    """Return the reason of each harmless name: ``Class.field[.key]``, ``environment.pattern``."""
    found: dict[str, str] = {}
    owner = reason = ""
    for line in _TABLE.read_text().splitlines():
        if line.startswith(" "):
            found |= {f"{owner}.{name}": reason for name in line.split()}
        elif line and not line.startswith("#"):
            owner, _, reason = line.partition(": ")
    return found


@functools.cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(translate, names)))


class Forms:
    """Makes forms. ``unknown`` has the paths of the values that have none. ``since_ns``: a file
    that changed since then may have been read before it changed.
    """

    def __init__(self, since_ns: int | None) -> None:
        self.unknown: list[str] = []
        self._since = since_ns
        self._open: list[int] = []
        """The objects around the one whose form is being made."""

    def sections(self, config: Any) -> dict[str, str]:
        """Return a digest of each part of vLLM's configuration; ``vllm_config`` is of the rest."""
        forms = {name: form for name, value in _members(config) if (form := self.of(value, name)) is not None}
        parts = {name for name in forms if dataclasses.is_dataclass(getattr(config, name))}
        rest = {name: form for name, form in forms.items() if name not in parts}
        return {name: digest(forms[name], name) for name in parts} | {"vllm_config": digest(rest, "vllm_config")}

    def environment(self) -> str:
        """Return the digest of the variables that count, vLLM's own as it reads them."""
        declared = _declared()
        leave = _pattern(tuple(name.removeprefix(_ENVIRONMENT) for name in harmless() if name.startswith(_ENVIRONMENT)))
        count = _pattern((*COUNTED, *sorted({f"{package.upper()}_*" for package, _ in _plugins()})))
        forms = {}
        for name in sorted({*declared, *filter(count.match, os.environ)}):
            if leave.match(name):
                continue
            value: Any = os.environ.get(name)
            with contextlib.suppress(Exception):  # vLLM's own reader refuses some values
                value = declared[name]() if name in declared else value
            forms[name] = self.of(value, name)
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
        """Return the form of a value, which JSON knows. ``path`` names the value, ``field`` the
        field whose dict may have harmless keys. None if it is None, or an object of which nothing
        counts.
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
            counted = [
                (name, form)
                for name, one in _members(value)
                if (form := self.of(one, f"{path}.{name}", f"{kind.__name__}.{name}")) is not None
            ]
            names = {one.__name__ for one in kind.__mro__}
            if not counted and any(name.partition(".")[0] in names for name in harmless()):
                return None
            return [self._code(kind, path), counted]
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
        """Return the form of a class or function: its name, and its source unless vLLM has it."""
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
    """Return what counts of an object: fields and attributes, not what was computed of them."""
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


def _names_files(place: Path) -> bool:
    """Return whether there is such a file, or a folder whose name is no single word."""
    try:
        return place.is_file() or ("/" in str(place) and place.is_dir())
    except (OSError, ValueError):
        return False


def _plugins() -> set[tuple[str, str]]:
    """Return the packages of vLLM's plugins that it loads, each with a plugin's name."""
    allowed = os.environ.get("VLLM_PLUGINS")
    found = [one for group in PLUGINS for one in entry_points(group=group)]
    found = [one for one in found if allowed is None or one.name in allowed.split(",")]
    return {(_top(one.module), one.name) for one in found if _top(one.module) not in ("vllm", OWN)}


def _declared() -> Mapping[str, Any]:
    try:
        from vllm import envs
    except ImportError:
        return {}
    return dict(getattr(envs, "environment_variables", {}))


def _top(module: str) -> str:
    return module.partition(".")[0]


MARGIN_NS = 1_000_000_000  # tolerance between the clocks that stamp files and processes
DUMMY = "dummy"  # vLLM's load format with made-up weights, from a constant seed
_SAFETENSORS = ("*.safetensors",)
_CONSOLIDATED = ("consolidated*.safetensors",)
_READ = {
    DUMMY: (),
    "auto": ("*.safetensors", "*.bin", "*.pt"),
    "hf": ("*.safetensors", "*.bin", "*.pt"),
    "safetensors": _SAFETENSORS,
    "fastsafetensors": _SAFETENSORS,
    "instanttensor": _SAFETENSORS,
    "mistral": _CONSOLIDATED,
    "pt": ("*.pt",),
}
"""The patterns that vLLM's DefaultModelLoader tries by load format; it reads the first one that
matches files.

npcache is absent: it reads copies that it made earlier. Other loaders may read anything.
"""
_PARTS = ("audio_model_id", "text_model_id")  # keys of a model's configuration that name further models
_COMMIT = re.compile(r"[0-9a-f]{40}\Z")


def weights_digest(model: Any, load: Any = None) -> str | None:
    """Return a digest of the weights of vLLM's ModelConfig, read as its LoadConfig says. None if
    the weights cannot be determined; the log says why. A folder without weight files has a digest
    too: its engine makes them up, or has none.
    """
    since, named = process_began_ns(), load_format(load)
    try:
        if url := getattr(model, "model_weights", None):
            raise Unreadable(
                f"{url}: an object store; to share blocks, name the weights with the option weights_version"
            )
        _check_loader(load, named)
        found = [files.files(place) for place in _places(model, load, since)]
        if not any(found):
            raise Unreadable(f"{model.model}: its files are not here")
        parts = [files.digest(some, [_reads(named, some)], since) for some in found]
    except (Unreadable, OSError) as error:
        log.warning("the engine's weights cannot be determined: %s", error)
        return None
    return _digest_of_texts(parts)


def load_format(load: Any) -> str:
    """Return the name of the load format."""
    asked = getattr(load, "load_format", "auto")
    return str(getattr(asked, "value", asked)).lower()


def _check_loader(load: Any, named: str) -> None:
    """Raise Unreadable for a loader that may read anything else."""
    extra = getattr(load, "model_loader_extra_config", None) or {}
    if named not in _READ:
        raise Unreadable(f"load_format {named}: it may read other weights than those in the folder")
    allowed = {one.rpartition(".")[2] for one in harmless() if one.startswith("LoadConfig.model_loader_extra_config.")}
    if not (isinstance(extra, dict) and set(extra) <= allowed):
        raise Unreadable(
            f"model_loader_extra_config, allowed is {', '.join(sorted(allowed))}: other keys may change what is read"
        )
    if not _own_loader(named):
        raise Unreadable(f"load_format {named}: a plugin's loader may read other weights than those in the folder")


def _own_loader(named: str) -> bool:
    """Return whether vLLM's own class reads this format; a plugin may have replaced it."""
    try:
        from vllm.model_executor import model_loader
    except ImportError:
        return True
    kind = model_loader._LOAD_FORMAT_TO_MODEL_LOADER.get(named)
    return kind is not None and kind.__module__.startswith("vllm.model_executor.model_loader.")


def _reads(named: str, found: dict[str, files.Found]) -> str:
    """Return the pattern of the files that vLLM reads as weights; it depends on the load format."""
    names = [name for name in found if "/" not in name]
    patterns = _READ[named]
    if named == "auto" and fnmatch.filter(names, _CONSOLIDATED[0]):
        patterns = _CONSOLIDATED
    return next((pattern for pattern in patterns if fnmatch.filter(names, pattern)), "")


def _places(model: Any, load: Any, since: int | None) -> list[Path]:
    """Return the folders to digest: of the model, its configuration, and partial models."""
    revision = getattr(model, "revision", None)
    asked = [(str(model.model), revision)]
    if other := getattr(model, "hf_config_path", None):
        asked.append((str(other), revision))
    config = getattr(model, "hf_config", None)
    asked += [(part, None) for name in _PARTS if isinstance(part := getattr(config, name, None), str)]
    places: list[Path] = []
    for name, version in asked:
        found = [Path(name)] if Path(name).exists() else _fetched(name, version, load, since)
        if not found:
            raise Unreadable(f"{name}: its files are not here")
        places += found
    return places


def _fetched(name: str, revision: str | None, load: Any, since: int | None) -> list[Path]:
    """Return the local folders of a model from the hub: its cache and vLLM's download folder."""
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise Unreadable(f"{name}: of another hub (VLLM_USE_MODELSCOPE)")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return []
    places: list[Path] = []
    for cache in dict.fromkeys((None, getattr(load, "download_dir", None))):
        try:
            place = Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
        except (OSError, ValueError):
            continue
        reference = place.parent.parent / "refs" / (revision or "main")
        others = any(other != place for other in place.parent.iterdir())
        moved = since is not None and others and reference.exists() and reference.stat().st_ctime_ns >= since
        if moved and not _COMMIT.match(revision or "main"):
            raise Unreadable(f"{reference}: it was moved since this process started")
        places.append(place)
    return places


def process_began_ns() -> int | None:
    """Return when vLLM created this process, which had loaded nothing then; else None."""
    if multiprocessing.parent_process() is None:
        return None  # the user's own process, which may have written the weights earlier
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[19])  # starttime, proc_pid_stat(5)
    except (OSError, ValueError, IndexError):
        return None
    age_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - ticks * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    return time.time_ns() - age_ns - MARGIN_NS


def expected_backends(vllm_config: Any, kv_cache_config: Any) -> str:
    """Return the backends that vLLM would choose for each group's layers, in order. A group is
    empty if vLLM cannot tell; without a selector the whole string is empty.
    """
    try:
        from vllm.config import set_current_vllm_config
        from vllm.v1.attention.selector import get_attn_backend
    except ImportError:
        return ""
    model, cache = vllm_config.model_config, vllm_config.cache_config
    names = []
    for spec in (group_spec(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups):
        kind, name = type(spec).__name__, ""
        if kind != STATE:  # whose specification says all about its form
            try:
                with set_current_vllm_config(vllm_config):
                    backend = get_attn_backend(
                        spec.head_size, model.dtype, cache.cache_dtype, use_mla="MLA" in kind,
                        has_sliding_window=kind in WINDOW,
                    )  # fmt: skip
                name = _backend_name(backend, vllm_config, spec)
            except Exception as error:  # noqa: BLE001  vLLM's internals, which may raise anything
                log.info("the attention backend of %s could not be determined: %s", kind, error)
        names.append(name)
    return "; ".join(names)


def used_backends(vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> str:
    """Return the backends that the layers of each group use in this worker, and into how many pages
    they split a block. A group without layers here, or whose layers do not tell, gets the expected
    backends.
    """
    layers = getattr(getattr(vllm_config, "compilation_config", None), "static_forward_context", None) or {}
    expected = expected_backends(vllm_config, kv_cache_config).split("; ")
    found = []
    for i, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group_spec(group.kv_cache_spec)
        names = group.layer_names if type(spec).__name__ != STATE else ()
        backends = [layers[name].get_attn_backend() for name in names if hasattr(layers.get(name), "get_attn_backend")]
        text = ", ".join(sorted({_backend_name(one, vllm_config, spec) for one in backends}))
        caches = [kv_caches[name] for name in group.layer_names if hasattr(kv_caches.get(name), "shape")]
        pages = sorted({int(one.shape[0]) // int(kv_cache_config.num_blocks) for one in caches} - {1})
        said = [text or "".join(expected[i : i + 1]), *(f"{count} pages a block" for count in pages)]
        found.append(" ".join(said).strip())
    return "; ".join(found)


def device_kind(cache: Any) -> str:
    """Return the kind of device. GPUs of all generations share: their results are equivalent."""
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return ""
    kind = str(getattr(current_platform, "device_name", "") or "")
    if kind == "cpu":
        return f"cpu {platform.machine()}"
    if not str(cache.cache_dtype).startswith("fp8"):
        return kind
    return f"{kind} fnuz" if current_platform.is_fp8_fnuz() else kind  # AMD's first FP8 has another zero and bias


def _backend_name(backend: Any, vllm_config: Any, spec: Any) -> str:
    name = str(backend.get_name())
    if name != "CPU_ATTN":
        return name
    asked = (vllm_config.model_config.dtype, spec.block_size, spec.head_size, vllm_config.cache_config.cache_dtype)
    return f"{name} {cpu_isa(*asked)}"


UNKNOWN = ""  # unknown weights: the generation determines who shares them
_WEAK_HASHES = ("xxhash", "xxhash_cbor")  # collisions can be constructed if the seed is known


def identity(
    vllm_config: Any,
    kv_cache_config: Any,
    tenant: str,
    ranks: Ranks,
    version: str,
    distribution: dict[str, str] | None = None,
) -> tuple[tuple[str, str], ...]:
    """Return the pairs of the identity. ``version`` is vLLM's: each minor version may define its
    own block layout. ``distribution``: the pairs that say which part of a block is in which shard,
    in place of the parallel sizes.
    """
    model, cache = vllm_config.model_config, vllm_config.cache_config
    algorithm = str(cache.prefix_caching_hash_algo)
    _check_hash(algorithm, tenant)
    layout = getattr(kv_cache_config, "kv_cache_layout", None) or getattr(cache, "kv_cache_layout", None)
    forms = Forms(process_began_ns())
    pairs = forms.sections(vllm_config) | {
        "environment": forms.environment(),
        "code": forms.code(getattr(getattr(model, "hf_config", None), "architectures", None) or ()),
        "model": str(model.model),
        "weights": _all_weights(vllm_config) or UNKNOWN,
        "generation": LOADED,
        "dtype": str(model.dtype),
        "resolved": expected_backends(vllm_config, kv_cache_config),
        "device": device_kind(cache),
        "tenant": tenant,
        "layout": str(getattr(layout, "name", layout) or ""),
        "shards": str(ranks.shards),
        "hash_seed": _seed(algorithm, str(vllm_config.kv_transfer_config.engine_id)),
        "engine": f"vllm {'.'.join(version.split('.')[:2])}",
    }
    if forms.unknown:
        log.warning(
            "this engine shares blocks with no other engine: of its configuration, %s. See docs/VLLM.md",
            "; ".join(forms.unknown),
        )
        pairs[UNSHARED] = of_engine(vllm_config)
    return identity_pairs(pairs | (distribution or _distribution(vllm_config.parallel_config, kv_cache_config)))


def _distribution(parallel: Any, kv_cache_config: Any) -> dict[str, str]:
    """Return what determines which part of a block is in which shard."""
    return {
        "groups": _digest_of_texts(repr(group_spec(group.kv_cache_spec)) for group in kv_cache_config.kv_cache_groups),
        "stages": os.environ.get("VLLM_PP_LAYER_PARTITION", ""),
        "tp": "any" if replicated(kv_cache_config) else str(parallel.tensor_parallel_size),
        "pp": str(parallel.pipeline_parallel_size),
    }


def unknown_weights(pairs: tuple[tuple[str, str], ...]) -> list[str]:
    """Return why an identity says nothing about the weights, if so: it must not be shared."""
    return ["the model's weight files are not in a local folder"] if dict(pairs)["weights"] == UNKNOWN else []


def unobserved(vllm_config: Any, options: Options) -> list[str]:
    """Return how weights may change unnoticed. OptionError if weights_fixed contradicts that."""
    if not options.weights_fixed:
        return [*unobserved_changes(vllm_config)]
    if vllm_config.weight_transfer_config is not None:
        raise OptionError("weights_fixed: true, allowed is false where weight_transfer_config is set")
    return []


def with_resolved(pairs: tuple[tuple[str, str], ...], names: str) -> tuple[tuple[str, str], ...]:
    """Return the identity of an engine whose layers use these attention backends."""
    return identity_pairs(dict(pairs) | {"resolved": names})


def as_worker(pairs: tuple[tuple[str, str], ...], worker: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """Return the scheduler's identity as a worker has it, but for the digest of the weights: if
    their files changed between the two, nobody knows which ones were loaded.
    """
    return identity_pairs(dict(worker) | {"weights": dict(pairs)["weights"]})


def _check_hash(algorithm: str, tenant: str) -> None:
    """Raise OptionError if clients of one tenant could forge another's block hashes."""
    if tenant and algorithm in _WEAK_HASHES and os.environ.get("PYTHONHASHSEED") is not None:
        raise OptionError(
            f"prefix_caching_hash_algo {algorithm} with a fixed PYTHONHASHSEED, while tenants share (tenant "
            f"{tenant!r}): prompts can be constructed that have another tenant's block hashes; start vLLM with "
            "--prefix-caching-hash-algo sha256 or sha256_cbor", "tenant",
        )  # fmt: skip


def _all_weights(vllm_config: Any) -> str | None:
    """Return what determines the engine's weights, including a draft model's. None if unknown."""
    load = getattr(vllm_config, "load_config", None)
    digest = weights_digest(vllm_config.model_config, load)
    if digest and load_format(load) == DUMMY:
        digest = f"{DUMMY} {digest}"
    speculative = getattr(vllm_config, "speculative_config", None)
    method = str(getattr(speculative, "method", None) or "")
    draft = getattr(speculative, "draft_model_config", None)
    if digest is None or draft is None or method in WITHOUT_DRAFTS:
        return digest
    load = getattr(speculative, "draft_load_config", None) or load
    drafts = weights_digest(draft, load)
    return drafts and f"{digest}, {method} {load_format(load)} {drafts}"


def _seed(algorithm: str, engine: str) -> str:
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return f"PYTHONHASHSEED {seed}"
    return f"random {engine}" if algorithm in _WEAK_HASHES else "default"


def _digest_of_texts(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
