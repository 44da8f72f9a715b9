"""The digest of weights: it changes with them, however the files were changed."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
import sys
import time
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvagent import files
from kvagent.files import Opened, Unreadable
from kvagent.vllm import space as weights
from kvagent.vllm.space import UNKNOWN, identity, weights_digest

if TYPE_CHECKING:
    from collections.abc import Callable

TENSORS = {"embed": 1 << 20, "norm": 512, "mlp.up": 3 << 20, "mlp.down": 3 << 20, "head": 1 << 20}
CONFIG = '{"model_type": "m"}'


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the files as too large to be read whole."""
    monkeypatch.setattr(files, "WHOLE_BYTES", 0)
    monkeypatch.setattr(files, "SAMPLES", 64)


def model(place: Path, **more: Any) -> Any:
    return SimpleNamespace(model=str(place), **more)


def load(load_format: str, **more: Any) -> Any:
    return SimpleNamespace(load_format=load_format, **more)


def safetensors(seed: int, tensors: dict[str, int] | None = None, **tuned: int) -> bytes:
    """Write a file of random tensors; ``tuned`` ones come from another seed."""
    header, data = {}, b""
    for name, size in (tensors or TENSORS).items():
        header[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [len(data), len(data) + size]}
        data += random.Random(f"{name} {tuned.get(name.replace('.', '_'), seed)}").randbytes(size)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def write(folder: Path, content: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(CONFIG)
    (folder / "model.safetensors").write_bytes(content)
    return folder


def same_times(folder: Path, like: Path) -> None:
    for path in (*folder.iterdir(), folder):
        times = (like / path.name if path != folder else like).stat()
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def turn_the_link(link: Path, other: Path) -> None:
    link.unlink()
    link.symlink_to(other)


def rename_the_folder(link: Path, other: Path) -> None:
    base = link.resolve()
    same_times(other, base)
    base.rename(base.with_name("old"))
    other.rename(base)


def overwrite_in_place(link: Path, other: Path) -> None:
    target = link / "model.safetensors"
    before = target.stat()
    with target.open("r+b") as file:
        file.write((other / "model.safetensors").read_bytes())
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (target.stat().st_mtime_ns, target.stat().st_size) == (before.st_mtime_ns, before.st_size)


SWAPS = [turn_the_link, rename_the_folder, overwrite_in_place]


@pytest.mark.parametrize("swap", SWAPS)
@pytest.mark.parametrize("whole", [True, False])
def test_another_checkpoint_at_the_same_path_is_told_apart(
    tmp_path: Path, swap: Callable[[Path, Path], None], whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fine-tune of the MLPs: the same names, sizes and shapes, and the same first and last
    MiB.
    """
    if not whole:
        monkeypatch.setattr(files, "WHOLE_BYTES", 0)
    base = write(tmp_path / "base", safetensors(1))
    tuned = write(tmp_path / "tuned", safetensors(1, mlp_up=2, mlp_down=2))
    link = tmp_path / "model"
    link.symlink_to(base)
    first = weights_digest(model(link))
    assert first is not None
    assert weights_digest(model(link)) == first, "nothing changed"
    swap(link, tuned)
    assert weights_digest(model(link)) not in (first, None), "weights that differ in the middle have one digest"


@pytest.mark.parametrize("name", TENSORS)
def test_every_tensor_counts(tmp_path: Path, name: str, sampled: None) -> None:
    folder = write(tmp_path / "model", safetensors(1))
    first = weights_digest(model(folder))
    write(folder, safetensors(1, None, **{name.replace(".", "_"): 2}))
    assert weights_digest(model(folder)) not in (first, None)


def test_few_changed_elements_everywhere_are_seen(tmp_path: Path, sampled: None) -> None:
    """One bfloat16 in a thousand, like a training step at a low rate, in one tensor."""
    folder = write(tmp_path / "model", safetensors(1))
    first = weights_digest(model(folder))
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    end = len(content) - TENSORS["head"]
    for at in random.Random(3).sample(range(end - TENSORS["mlp.down"], end, 2), TENSORS["mlp.down"] // 2 // 1000):
        content[at] ^= 1
    path.write_bytes(content)
    assert weights_digest(model(folder)) not in (first, None)


def test_the_middle_of_a_tensor_counts(tmp_path: Path, sampled: None) -> None:
    """One of several experts in one tensor."""
    folder = write(tmp_path / "model", safetensors(1))
    first = weights_digest(model(folder))
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    begin = len(content) - TENSORS["head"] - TENSORS["mlp.down"] // 2
    content[begin : begin + TENSORS["mlp.down"] // 8] = bytes(TENSORS["mlp.down"] // 8)
    path.write_bytes(content)
    assert weights_digest(model(folder)) not in (first, None), "a part of a tensor is not in the digest"


def test_equal_files_elsewhere_have_the_same_digest(tmp_path: Path, sampled: None) -> None:
    one, other = write(tmp_path / "one", safetensors(1)), write(tmp_path / "other", safetensors(1))
    assert weights_digest(model(one)) == weights_digest(model(other)) is not None


def test_samples_are_within_the_tensor_and_the_same_each_time() -> None:
    for size in (0, 1, 4096, files.SMALL_BYTES + 1, 1 << 20, (1 << 30) + 7):
        span = files.Span(12345, size)
        found = list(files.places(span, 1 << 20))
        assert found == list(files.places(span, 1 << 20))
        assert all(span.offset <= one.offset and one.offset + one.bytes <= span.offset + size for one in found)
        if size <= files.SMALL_BYTES:
            assert sum(one.bytes for one in found) == size
        else:
            assert len(found) >= files.LEAST_SAMPLES
            assert found[0].offset == span.offset
            assert found[-1].offset + found[-1].bytes == span.offset + size


def header(text: bytes | str, data: int = 64, size: int | None = None) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(raw) if size is None else size) + raw + b"\0" * data


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\1\2\3", "not a safetensors file"),
        (header("{}", size=1 << 63), "allowed is up to"),
        (header("{}", size=100), "allowed is up to"),
        (header("{"), "not JSON"),
        (header(b"\xff\xfe"), "not JSON"),
        (header("[" * 200_000), "not JSON"),
        (header("[1]"), "does not name"),
        (header('{"a": 1}'), "data_offsets of 'a'"),
        (header('{"a": {"data_offsets": [0, 65]}}'), "within its 64 bytes"),
        (header('{"a": {"data_offsets": [-1, 6]}}'), "data_offsets"),
        (header('{"a": {"data_offsets": [7, 6]}}'), "data_offsets"),
        (header('{"a": {"data_offsets": [0, 1e3]}}'), "data_offsets"),
        (header('{"a": {"data_offsets": [0]}}'), "data_offsets"),
    ],
)
def test_a_hostile_header_says_nothing_of_the_weights(
    tmp_path: Path, content: bytes, said: str, sampled: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert weights_digest(model(write(tmp_path / "model", content))) is None
    assert said in caplog.text


def test_a_file_of_torch_counts_by_its_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One changed element of a large storage that no sample covers."""
    monkeypatch.setattr(files, "WHOLE_BYTES", 0)
    monkeypatch.setattr(files, "SAMPLES", 1)
    found = []
    for edit in (0, 1):
        storage = bytearray(4 << 20)
        storage[1 << 20 : (1 << 20) + edit] = b"\1" * edit
        with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
            archive.writestr(zipfile.ZipInfo("archive/data/0"), bytes(storage))
        found.append(weights_digest(model(tmp_path)))
    assert None not in found
    assert found[0] != found[1]


@pytest.mark.parametrize("size", [0xFFFFFFFF, 1 << 31])
def test_a_hostile_directory_of_a_zip_file(tmp_path: Path, size: int, sampled: None) -> None:
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, size, 0xFFFFFFF0, 0)
    (tmp_path / "model.bin").write_bytes(b"PK\3\4" + b"\0" * 100_000 + end)
    assert weights_digest(model(tmp_path)) is None


def test_a_zip_file_of_more_than_4_gib_is_understood(tmp_path: Path) -> None:
    path = tmp_path / "large.bin"
    directory = b"PK\1\2 of the directory"
    record = struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, 1, 1, len(directory), 5 << 30)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, (5 << 30) + len(directory), 1)
    end = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 1, 1, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    with path.open("wb") as file:  # sparse
        file.write(b"PK\3\4")
        file.seek(5 << 30)
        file.write(directory + record + locator + end)
    with path.open("rb") as opened:
        one = Opened("large.bin", opened.fileno(), path.stat().st_size)
        assert files.Span(5 << 30, len(directory)) in files.spans(one)


def test_a_file_that_ends_early_is_unreadable(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"a" * 100)
    with path.open("rb") as file, pytest.raises(Unreadable, match="ended at 100 of 200 bytes"):
        files.digests([Opened("a.gguf", file.fileno(), 200)])


# Which weights the engine has, and when it loaded them.


def test_files_that_changed_since_the_process_began_say_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "model", safetensors(1))
    changed = (folder / "model.safetensors").stat().st_ctime_ns
    monkeypatch.setattr(weights, "process_began_ns", lambda: changed + 1)
    assert weights_digest(model(folder)) is not None
    monkeypatch.setattr(weights, "process_began_ns", lambda: changed)
    assert weights_digest(model(folder)) is None
    assert "model.safetensors: it was changed since this process started" in caplog.text


def test_files_that_change_while_they_are_read_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write(tmp_path / "model", safetensors(1))

    digests = files.digests

    def read(some: Any) -> list[bytes]:
        found = digests(some)
        path = folder / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        return found

    monkeypatch.setattr(files, "digests", read)
    assert weights_digest(model(folder)) is None


def test_a_process_that_vllm_made_knows_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    assert weights.process_began_ns() is None
    monkeypatch.setattr("multiprocessing.parent_process", lambda: "somebody")
    began = weights.process_began_ns()
    assert began is not None
    assert began < time.time_ns() - weights.MARGIN_NS
    assert began == pytest.approx(weights.process_began_ns(), abs=50_000_000)


@pytest.mark.parametrize(
    "loaded",
    [
        load("tensorizer"), load("sharded_state"), load("runai_streamer"), load("ipc_cache"), load("modelexpress"),
        load("npcache"), load("a_plugins_own"), load("auto", model_loader_extra_config={"pattern": "x"}),
        load("auto", model_loader_extra_config=SimpleNamespace(uri="x")),
    ],
)  # fmt: skip
def test_loaders_that_may_read_something_else_take_no_digest_of_the_folder(tmp_path: Path, loaded: Any) -> None:
    folder = write(tmp_path / "model", safetensors(1))
    assert weights_digest(model(folder), load("auto", model_loader_extra_config={"num_threads": 4})) is not None
    assert weights_digest(model(folder), loaded) is None


def test_what_is_read_of_a_folder_counts(tmp_path: Path) -> None:
    """The same files in the folder, of which the engine reads others as weights."""
    folder = write(tmp_path / "model", safetensors(1))
    (folder / "model.pt").write_bytes(b"other weights")
    read = {name: weights_digest(model(folder), load(name)) for name in ("auto", "hf", "safetensors", "pt", "mistral")}
    assert read["auto"] == read["hf"] == read["safetensors"] is not None
    assert len({read["auto"], read["pt"], read["mistral"]}) == 3
    (folder / "consolidated.safetensors").write_bytes(safetensors(2))
    assert weights_digest(model(folder), load("auto")) == weights_digest(model(folder), load("mistral"))
    assert weights_digest(model(folder), load("auto")) != weights_digest(model(folder), load("hf"))


def test_code_and_other_configurations_count(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", safetensors(1))
    other = tmp_path / "config"
    other.mkdir()
    (other / "config.json").write_text('{"rope_theta": 1}')
    digests = [weights_digest(model(folder)), weights_digest(model(folder, hf_config_path=str(other)))]
    (other / "config.json").write_text('{"rope_theta": 2}')
    digests += [weights_digest(model(folder, hf_config_path=str(other)))]
    (folder / "modeling.py").write_text("")
    digests += [weights_digest(model(folder))]
    part = SimpleNamespace(audio_model_id=str(other), text_model_id=None)
    digests += [weights_digest(model(folder, hf_config=part))]
    assert None not in digests
    assert len(set(digests)) == len(digests)
    assert weights_digest(model(folder, hf_config=SimpleNamespace(audio_model_id="nowhere/model"))) is None


def test_a_folder_that_leads_to_itself_is_read_once(tmp_path: Path) -> None:
    folder = write(tmp_path / "model", safetensors(1))
    first = weights_digest(model(folder))
    (folder / "again").symlink_to(folder)
    assert weights_digest(model(folder)) == first
    (folder / ".cache").mkdir()
    (folder / ".cache" / "state.json").write_text("{}")
    assert weights_digest(model(folder)) == first


def test_a_folder_of_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_FILES", 1)
    assert weights_digest(model(write(tmp_path / "model", safetensors(1)))) is None


# The hub's cache.


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a hub's cache with one model, of which refs/main names a commit."""
    repo = tmp_path / "hub" / "models--org--m"
    for folder in ("blobs", "refs", "snapshots/one"):
        (repo / folder).mkdir(parents=True)
    (repo / "blobs" / ("a" * 64)).write_bytes(safetensors(1))
    (repo / "blobs" / ("b" * 40)).write_text(CONFIG)
    (repo / "snapshots" / "one" / "model.safetensors").symlink_to(f"../../blobs/{'a' * 64}")
    (repo / "snapshots" / "one" / "config.json").symlink_to(f"../../blobs/{'b' * 40}")
    (repo / "refs" / "main").write_text("one")

    def snapshot_download(name: str, revision: str | None, cache_dir: str | None, local_files_only: bool) -> str:
        assert local_files_only
        base = Path(cache_dir) if cache_dir else tmp_path / "hub"
        folder = base / f"models--{name.replace('/', '--')}"
        try:
            commit = (folder / "refs" / (revision or "main")).read_text()
        except OSError as error:
            raise FileNotFoundError("not cached") from error
        return str(folder / "snapshots" / commit)

    module = ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    monkeypatch.setattr(weights, "_own_loader", lambda _: True)  # vLLM, where it is there, needs the real hub
    monkeypatch.delenv("VLLM_USE_MODELSCOPE", raising=False)
    return repo


def test_a_model_of_the_hub_counts_by_the_names_of_its_content(hub: Path, sampled: None) -> None:
    first = weights_digest(SimpleNamespace(model="org/m", revision=None))
    assert first is not None
    (hub / "blobs" / ("a" * 64)).rename(hub / "blobs" / ("c" * 64))
    link = hub / "snapshots" / "one" / "model.safetensors"
    link.unlink()
    link.symlink_to(f"../../blobs/{'c' * 64}")
    second = weights_digest(SimpleNamespace(model="org/m", revision=None))
    assert second not in (first, None), "the same samples, but other content by its name"
    blob = hub / "blobs" / ("c" * 64)
    blob.write_bytes(safetensors(1, mlp_up=2))
    assert weights_digest(SimpleNamespace(model="org/m", revision=None)) not in (second, None), "a name may lie"


def test_a_model_that_was_just_fetched_is_one_that_can_be_shared(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are new, but named by their content. A revision whose name moved may be either."""
    monkeypatch.setattr(weights, "process_began_ns", lambda: 1)
    asked = SimpleNamespace(model="org/m", revision=None)
    assert weights_digest(asked) is not None
    shutil.copytree(hub / "snapshots" / "one", hub / "snapshots" / "two", symlinks=True)
    assert weights_digest(asked) is None
    monkeypatch.setattr(weights, "process_began_ns", lambda: time.time_ns() + 10**9)
    assert weights_digest(asked) is not None


def test_weights_that_were_fetched_elsewhere_are_looked_for_there(hub: Path, tmp_path: Path) -> None:
    """Such as another commit than that in the usual cache."""
    asked = SimpleNamespace(model="org/m", revision=None)
    first = weights_digest(asked, load("auto", download_dir=None))
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(hub.parent, elsewhere, symlinks=True)
    blob = elsewhere / hub.name / "blobs" / ("a" * 64)
    blob.write_bytes(safetensors(2))
    assert weights_digest(asked, load("auto", download_dir=str(elsewhere))) not in (first, None)


def test_a_model_of_another_hub_is_not_looked_for_in_this_one(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    assert weights_digest(SimpleNamespace(model="org/m", revision=None)) is None


def test_weights_of_an_object_store_need_a_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "model", safetensors(1))
    for how in ("runai_streamer", "auto"):
        assert weights_digest(model(folder, model_weights="s3://bucket/m/"), load(how)) is None
        assert "s3://bucket/m/: an object store; to share blocks, name the weights with the option" in caplog.text
        caplog.clear()


# Draft models.


def of_draft(target: Path, **speculative: Any) -> str:
    config = SimpleNamespace(
        model_config=model(target, dtype="bfloat16"),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256", cache_dtype="auto"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        kv_transfer_config=SimpleNamespace(engine_id="this"),
        load_config=load("auto"),
        speculative_config=SimpleNamespace(**speculative) if speculative else None,
    )
    ranks: Any = SimpleNamespace(shards=1)
    pairs = identity(config, SimpleNamespace(kv_cache_groups=[]), "", ranks, "0.33.0")
    return dict(pairs)["weights"]


def test_the_weights_of_a_draft_model_count(tmp_path: Path) -> None:
    """The KV of its layers is in the same blocks."""
    target, draft = write(tmp_path / "target", safetensors(1)), write(tmp_path / "draft", safetensors(2))
    alone = of_draft(target)
    assert of_draft(target, method="ngram", draft_model_config=model(target)) == alone
    both = of_draft(target, method="draft_model", draft_model_config=model(draft))
    assert both != alone
    write(draft, safetensors(3))
    assert of_draft(target, method="draft_model", draft_model_config=model(draft)) not in (both, alone)
    unknown = of_draft(target, method="draft_model", draft_model_config=model(Path("org/none")))
    assert unknown == UNKNOWN
