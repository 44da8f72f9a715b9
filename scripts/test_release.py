"""Tests of what `make release` made, in dist/release."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
MADE = ROOT / "dist/release"
DOCS = (ROOT / "docs/RELEASING.md").read_text()
MODULE = "{{with .Module}}{{.Path}} {{.Version}}{{end}}"
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def one(ending: str) -> Path:
    (path,) = MADE.glob(f"kvagent*{ending}")
    return path


def version() -> str:
    return one("_image.tar").name.removeprefix("kvagent_").removesuffix("_image.tar")


def unpacked(name: str, to: Path) -> Path:
    unpack(one(name).read_bytes(), to)
    return to


def unpack(archive: bytes, to: Path) -> None:
    to.mkdir(exist_ok=True)
    compressed = ["-z"] if archive.startswith(b"\x1f\x8b") else []
    subprocess.run(["tar", "-x", *compressed, "-C", to], check=True, input=archive)


class Image:
    """The image of one platform, from the layout."""

    def __init__(self, layout: Path, arch: str) -> None:
        self.layout = layout
        (top,) = json.loads((layout / "index.json").read_bytes())["manifests"]
        assert top["annotations"] == {"org.opencontainers.image.ref.name": version()}
        (mine,) = [each for each in self.json(top)["manifests"] if each["platform"]["architecture"] == arch]
        manifest = self.json(mine)
        self.config = self.json(manifest["config"])
        self.layers = [gzip.decompress(self.blob(layer)) for layer in manifest["layers"]]

    def blob(self, descriptor: dict[str, Any]) -> bytes:
        algorithm, _, digest = descriptor["digest"].partition(":")
        data = (self.layout / "blobs" / algorithm / digest).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (descriptor["size"], digest)
        return data

    def json(self, descriptor: dict[str, Any]) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.blob(descriptor))
        return document


@pytest.mark.parametrize("arch", MACHINES)
def test_the_image_starts_with_its_own_libraries(tmp_path: Path, arch: str) -> None:
    image = Image(unpacked("_image.tar", tmp_path / "layout"), arch)
    assert image.config["architecture"] == arch
    assert image.config["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(x).hexdigest()}" for x in image.layers]
    root = tmp_path / "root"
    for layer in image.layers:
        unpack(layer, root)
    kvagent = root / "usr/local/bin/kvagent"
    start: list[str | Path] = ["chroot", "--userspec=65532:65532", root, "/usr/local/bin/kvagent"]
    if arch == "arm64":
        start = ["qemu-aarch64-static", "-L", root, kvagent]
    elif os.geteuid() != 0:
        pytest.skip("only root may chroot: LEFT OUT")
    said = subprocess.run([*start, "version"], check=True, capture_output=True, text=True, timeout=60).stdout
    assert f"{version()} (commit " in said
    assert f" linux/{arch}," in said
    # One program is in the image, in the archive and in the wheel.
    archive_of = unpacked(f"_linux_{arch}.tar.gz", tmp_path / "archive")
    assert sorted(path.name for path in archive_of.iterdir()) == ["LICENSE", "kvagent"]
    with zipfile.ZipFile(one(f"_{MACHINES[arch]}.whl")) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".data/scripts/kvagent")]
        assert wheel.read(name) == kvagent.read_bytes() == (archive_of / "kvagent").read_bytes()


def test_the_image_is_configured_as_the_dockerfile_says(tmp_path: Path) -> None:
    config = Image(unpacked("_image.tar", tmp_path), "amd64").config["config"]
    stage = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2].replace(" \\\n     ", "")
    steps = dict(line.split(" ", 1) for line in stage.splitlines() if re.match(r"[A-Z]+ ", line))
    assert [json.loads(steps["ENTRYPOINT"]), json.loads(steps["CMD"])] == [config["Entrypoint"], config["Cmd"]]
    assert [steps["USER"], steps["VOLUME"]] == [config["User"], *config["Volumes"]]
    assert steps["ENV"].split() == config["Env"][1:]
    labels = steps["LABEL"].replace("${VERSION}", version())
    assert dict(re.findall(r'([a-z.]+)="([^"]*)"', labels)) == config["Labels"]


def test_the_chart_has_the_version(tmp_path: Path) -> None:
    chart = unpacked(f"-{version()}.tgz", tmp_path) / "kvagent"
    text = (chart / "Chart.yaml").read_text()
    assert f"\nversion: {version()}\nappVersion: {version()}\n" in text
    (chart / "Chart.yaml").write_text(text.replace(f"version: {version()}\nappVersion: {version()}", "version: 0.0.0"))
    subprocess.run(["diff", "-r", chart, ROOT / "deploy/chart"], check=True)


def test_the_bill_has_what_the_release_consists_of() -> None:
    bill = json.loads(one(".spdx.json").read_bytes())
    assert (bill["spdxVersion"], bill["SPDXID"]) == ("SPDX-2.3", "SPDXRef-DOCUMENT")
    packages = {package["name"]: package for package in bill["packages"]}
    identifiers = {bill["SPDXID"], *(package["SPDXID"] for package in bill["packages"])}
    assert len(identifiers) == 1 + len(bill["packages"])
    for each in bill["relationships"]:
        assert {each["spdxElementId"], each["relatedSpdxElement"]} <= identifiers
    for path in MADE.iterdir():
        if not path.name.startswith("SHA256SUMS") and path != one(".spdx.json"):
            (checksum,) = packages[path.name]["checksums"]
            assert checksum["checksumValue"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert {"stdlib", "libc6", "libc6-arm64-cross", "msgpack", "pyzmq"} <= set(packages)
    command = ["go", "list", "-deps", "-tags", "cuda", "-f", MODULE, "./cmd/kvagent"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    linked = dict(line.split() for line in listed.splitlines() if len(line.split()) == 2)
    assert len(linked) > 10
    assert {module: packages[module]["versionInfo"] for module in linked} == linked


def test_the_commands_that_verify_a_release(tmp_path: Path) -> None:
    """Run the commands of docs/RELEASING.md on a release that is signed, and that somebody changed."""
    commands = re.findall(r"^    ((?:ssh-keygen -Y verify|sha256sum) .*)$", DOCS, re.MULTILINE)
    key, out = tmp_path / "key", tmp_path / "out"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    make_again(out, key)
    (out / "signers").write_text("kvagent " + key.with_suffix(".pub").read_text())

    def verified() -> list[bool]:
        return [subprocess.run(["sh", "-c", command], cwd=out, check=False).returncode == 0 for command in commands]

    assert verified() == [True, True]
    with (out / one("_image.tar").name).open("ab") as file:
        file.write(b"x")
    assert verified() == [True, False]
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in out.glob("kvagent*"))
    (out / "SHA256SUMS").write_text(sums)
    assert verified() == [False, True]


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    make_again(tmp_path / "out")
    assert (tmp_path / "out/SHA256SUMS").read_text() == (MADE / "SHA256SUMS").read_text()


def make_again(out: Path, key: Path | str = "") -> None:
    epoch = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, check=True, capture_output=True, text=True)
    command = [sys.executable, ROOT / "scripts/release", version(), epoch.stdout.strip(), key, out]
    subprocess.run(command, check=True, timeout=300)
