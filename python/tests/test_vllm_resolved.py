"""The canonical form of a configuration and of the environment: what differs has another form, what
has none is named.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvagent.vllm import space as resolved
from kvagent.vllm.space import Forms

if TYPE_CHECKING:
    from types import ModuleType


def form(value: Any) -> Any:
    """Return the form of a value, which must have one."""
    forms = Forms(None)
    found = forms.of(value, "here")
    assert not forms.unknown
    return found


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Point:
    x: Any = 0
    y: Any = 0


@dataclasses.dataclass
class SchedulerConfig:
    """As vLLM's, of whose fields the table names one."""

    max_num_seqs: int = 1
    runner_type: str = "generate"


@dataclasses.dataclass
class ObservabilityConfig:
    kv_cache_metrics: bool = False


def test_different_values_have_different_forms() -> None:
    values = [
        None, 0, 1, True, 1.0, "1", b"1", 1 + 0j, 0.1, 0.1 + 2**-56, float("nan"), float("inf"), "", [], {}, set(), [0],
        [1], [[1]], [1, [2]], [[1, 2]], {1}, {"1"}, {"a": 1}, {"a": "1"}, {1: "a"}, {"a": {"b": 1}}, range(2), range(3),
        Color.RED, Color.BLUE, Color, Point, Point(), Point(1), Point(0, 1), Point(Point()), SimpleNamespace(x=0, y=0),
        functools.partial(sorted, reverse=True), functools.partial(sorted, reverse=False), len, sorted,
        dataclasses.is_dataclass,
    ]  # fmt: skip
    forms = [repr(form(value)) for value in values]
    assert len(set(forms)) == len(forms)
    assert form({"a": 1, "b": 2}) == form({"b": 2, "a": 1})
    assert form({3, 1, 2}) == form({2, 3, 1})


def test_an_attribute_that_is_no_field_counts() -> None:
    point = Point()
    object.__setattr__(point, "z", 0)
    assert form(point) != form(Point())


def test_what_was_computed_of_an_object_does_not_count() -> None:
    class Sized(Point):
        @functools.cached_property
        def size(self) -> int:
            return 7

    sized = Sized()
    before = form(sized)
    assert sized.size == 7
    assert form(sized) == before


def test_the_table_is_of_fields_by_class_and_of_keys() -> None:
    assert form(SchedulerConfig(2)) == form(SchedulerConfig())
    assert form(SchedulerConfig(1, "pooling")) != form(SchedulerConfig())
    assert form(ObservabilityConfig(True)) is form(None) is None, "nothing of it counts"
    new = ObservabilityConfig()
    object.__setattr__(new, "of_tomorrow", 1)
    assert form(new) is not None
    loaded = dataclasses.make_dataclass("LoadConfig", ["model_loader_extra_config"])
    assert form(loaded({"num_threads": 4})) == form(loaded({}))
    assert form(loaded({"pattern": "x"})) != form(loaded({}))


def test_every_name_of_the_table_has_one_reason() -> None:
    lines = Path(resolved.__file__).with_name("harmless.txt").read_text().splitlines()
    names = [name for line in lines if line.startswith(" ") for name in line.split()]
    assert len(names) == len(resolved.harmless())
    assert all(resolved.harmless().values())


def closed(secret: int) -> Any:
    return lambda config: secret + config


class Opaque:
    def __init__(self) -> None:
        self.hidden = 1

    def method(self) -> None:
        """Return nothing."""


class Numbers(list):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    "value", [object(), Opaque(), Numbers(), closed(1), iter([]), Opaque().method, memoryview(b""), sys], ids=repr
)
def test_a_value_without_a_form_is_named(value: Any) -> None:
    for around in (value, [value], {"a": value}, Point(value), SimpleNamespace(x=[Point(0, value)])):
        forms = Forms(None)
        forms.of(around, "part.field")
        assert [one.startswith("part.field") for one in forms.unknown] == [True]


def test_what_contains_itself_has_a_form() -> None:
    one, other = Point(), Point(1)
    one.y = one
    other.y = other
    assert form(one) != form(other)
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    forms = Forms(None)
    forms.of(deep, "part.field")
    assert "is too deep" in forms.unknown[0]


def test_files_and_folders_count_by_content(tmp_path: Path) -> None:
    """Whatever the option, and wherever they are."""
    scales, folder = tmp_path / "scales.npy", tmp_path / "folder"
    scales.write_bytes(b"1")
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "x.bin").write_bytes(b"1")

    def now() -> list[str]:
        texts = [str(scales), f"/nowhere:{scales}", str(folder)]
        return [*(repr(form(Point(text))) for text in texts), repr(form({"path": scales}))]

    first = now()
    assert now() == first
    scales.write_bytes(b"2")
    (folder / "deep" / "x.bin").write_bytes(b"2")
    assert all(one != other for one, other in zip(first, now(), strict=True))


def test_a_file_that_may_have_been_read_before_it_changed_is_unknown(tmp_path: Path) -> None:
    scales = tmp_path / "scales"
    scales.write_bytes(b"1")
    forms = Forms(scales.stat().st_ctime_ns)
    forms.of({"path": str(scales)}, "part.field")
    assert "part.field.path names" in forms.unknown[0]
    assert "changed since" in forms.unknown[0]


def package(folder: Path, name: str, text: str) -> ModuleType:
    """Write a package and import it anew."""
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "__init__.py").write_text("")
    (folder / name / "code.py").write_text(text)
    for module in [one for one in sys.modules if one.partition(".")[0] == name]:
        del sys.modules[module]
    importlib.invalidate_caches()
    return importlib.import_module(f"{name}.code")


def test_code_from_elsewhere_counts_by_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "def change(config): return config\nclass Model: pass\n"
    module = package(tmp_path, "someones", text)
    values = [module.change, module.Model, "someones.code:Model", "someones.code.Model"]
    first = [form(value) for value in values]
    module = package(tmp_path, "someones", text + "# changed\n")
    values[:2] = [module.change, module.Model]
    assert all(form(value) != before for value, before in zip(values, first, strict=True))
    exec("def change(config): return config", made := {"__name__": "typed"})  # noqa: S102
    forms = Forms(None)
    forms.of(made["change"], "part.field")
    assert "source is not here" in forms.unknown[0]


def test_plugins_of_vllm_count_by_their_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))

    def now() -> tuple[str, str]:
        forms = Forms(None)
        return forms.code([]), forms.environment()

    none = now()
    package(tmp_path, "turbo", "FAST = 1\n")
    info = tmp_path / "turbo-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: turbo\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nturbo = turbo.code:register\n")
    first = now()
    assert first[0] != none[0]
    package(tmp_path, "turbo", "FAST = 2\n")
    assert now()[0] not in (first[0], none[0])
    monkeypatch.setenv("TURBO_BITS", "4")
    assert now()[1] != first[1], "a variable of the plugin"
    monkeypatch.setenv("VLLM_PLUGINS", "kvagent")
    assert now() == none, "it is not loaded"


def of_environment() -> str:
    return Forms(None).environment()


@pytest.mark.parametrize("name", ["VLLM_OF_TOMORROW", "TORCH_OF_TOMORROW", "NVIDIA_TF32_OVERRIDE", "HF_OF_TOMORROW"])
def test_an_unknown_variable_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [of_environment()]
    for value in ("1", "2"):
        monkeypatch.setenv(name, value)
        found.append(of_environment())
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    "name",
    [
        "MY_POD_IP", "PWD", "HOSTNAME", "KUBERNETES_SERVICE_HOST", "VLLM_QWEN_SERVICE_HOST", "VLLM_QWEN_PORT",
        "VLLM_QWEN_PORT_8000_TCP_ADDR", "VLLM_API_KEY", "VLLM_HOST_IP", "VLLM_LOGGING_LEVEL", "VLLM_DP_RANK",
        "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "HF_HOME", "HF_TOKEN",
    ],
)  # fmt: skip
def test_what_differs_between_nodes_and_restarts_does_not_count(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    first = of_environment()
    monkeypatch.setenv(name, "7")
    assert of_environment() == first


def test_a_variable_that_names_a_file_counts_by_its_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "table.json"
    monkeypatch.setenv("VLLM_OF_TOMORROW", str(file))
    found = []
    for text in ("1", "2"):
        file.write_text(text)
        found.append(of_environment())
    assert len(set(found)) == 2


def test_a_variable_that_vllm_cannot_read_counts_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> str:
        raise ValueError("no such choice")

    monkeypatch.setattr(resolved, "_declared", lambda: {"VLLM_CHOICE": refused})
    found = []
    for value in ("a", "b"):
        monkeypatch.setenv("VLLM_CHOICE", value)
        found.append(of_environment())
    assert len(set(found)) == 2
