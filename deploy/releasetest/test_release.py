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

ROOT = Path(__file__).resolve().parents[2]
MADE = ROOT / "dist/release"
MODULE = "{{with .Module}}{{.Path}} {{.Version}}{{end}}"
MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}


def output(*command: str | Path, **more: Any) -> str:
    """Return what a command prints, which pytest shows of a test that fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300, check=False, **more)
    print(done.stdout)
    done.check_returncode()
    return str(done.stdout)


def one(ending: str) -> Path:
    (path,) = MADE.glob(f"kvagent*{ending}")
    return path


def version() -> str:
    return one("_image.tar").name.removeprefix("kvagent_").removesuffix("_image.tar")


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def unpacked(name: str, to: Path) -> Path:
    to.mkdir(exist_ok=True)
    output("tar", "-x", "-f", one(name), "-C", to)
    return to


def blob(layout: Path, descriptor: dict[str, Any]) -> bytes:
    algorithm, _, digest = str(descriptor["digest"]).partition(":")
    data = (layout / "blobs" / algorithm / digest).read_bytes()
    assert (len(data), sha256(data)) == (descriptor["size"], digest)
    return data


@pytest.mark.parametrize("arch", MACHINES)
def test_the_image_starts_with_its_own_libraries(tmp_path: Path, arch: str) -> None:
    layout, root = unpacked("_image.tar", tmp_path / "layout"), tmp_path / "root"
    (top,) = json.loads((layout / "index.json").read_bytes())["manifests"]
    assert top["annotations"] == {"org.opencontainers.image.ref.name": version()}
    manifests = json.loads(blob(layout, top))["manifests"]
    (mine,) = [each for each in manifests if each["platform"] == {"architecture": arch, "os": "linux"}]
    manifest = json.loads(blob(layout, mine))
    image = json.loads(blob(layout, manifest["config"]))
    layers = [gzip.decompress(blob(layout, each)) for each in manifest["layers"]]
    assert [image["architecture"], image["os"]] == [arch, "linux"]
    assert image["rootfs"]["diff_ids"] == [f"sha256:{sha256(layer)}" for layer in layers]
    root.mkdir()
    for layer in layers:
        subprocess.run(["tar", "-x", "-C", root], check=True, input=layer)
    config = image["config"]
    assert [config["Cmd"][0], *config["Volumes"]] == ["serve", "/run/kvagent"]
    assert config["Env"][1:] == ["NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute"]
    assert config["Labels"]["org.opencontainers.image.version"] == version()
    (entrypoint,) = config["Entrypoint"]
    kvagent = root / entrypoint[1:]
    start: list[str | Path] = ["chroot", f"--userspec={config['User']}", root, entrypoint]
    if arch == "arm64":
        start = ["qemu-aarch64-static", "-L", root, kvagent]
    elif os.geteuid() != 0:
        pytest.skip("only root may chroot: LEFT OUT")
    said = output(*start, "version")
    assert f"{version()} (commit " in said
    assert f" linux/{arch}," in said
    # One program is in the image, in the archive and in the wheel.
    archive_of = unpacked(f"_linux_{arch}.tar.gz", tmp_path / "archive")
    assert sorted(path.name for path in archive_of.iterdir()) == ["LICENSE", "kvagent"]
    with zipfile.ZipFile(one(f"_{MACHINES[arch]}.whl")) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".data/scripts/kvagent")]
        assert wheel.read(name) == kvagent.read_bytes() == (archive_of / "kvagent").read_bytes()


def test_the_chart_has_the_version(tmp_path: Path) -> None:
    chart = unpacked(f"-{version()}.tgz", tmp_path) / "kvagent"
    text = (chart / "Chart.yaml").read_text()
    assert f"\nversion: {version()}\nappVersion: {version()}\n" in text
    (chart / "Chart.yaml").write_text(text.replace(f"version: {version()}\nappVersion: {version()}", "version: 0.0.0"))
    output("diff", "-r", chart, ROOT / "deploy/chart")


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
            assert checksum["checksumValue"] == sha256(path.read_bytes())
    assert {"stdlib", "libc6", "libc6-arm64-cross", "msgpack", "pyzmq"} <= set(packages)
    listed = output("go", "list", "-deps", "-tags", "cuda", "-f", MODULE, "./cmd/kvagent", cwd=ROOT)
    linked = dict(line.split() for line in listed.splitlines() if len(line.split()) == 2)
    assert len(linked) > 10
    assert {module: packages[module]["versionInfo"] for module in linked} == linked


def test_a_release_made_again_has_the_same_bytes_and_verifies(tmp_path: Path) -> None:
    """Run the commands of docs/RELEASING.md on a release that is signed, and then changed."""
    docs = (ROOT / "docs/RELEASING.md").read_text()
    commands = re.findall(r"(?m)^    ((?:ssh-keygen -Y verify|sha256sum) .*)$", docs)
    key, out = tmp_path / "key", tmp_path / "out"
    output("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key)
    epoch = output("git", "log", "-1", "--format=%ct", cwd=ROOT).strip()
    output(sys.executable, ROOT / "scripts/release", version(), epoch, key, out)
    assert (out / "SHA256SUMS").read_text() == (MADE / "SHA256SUMS").read_text()
    (out / "signers").write_text("kvagent " + key.with_suffix(".pub").read_text())

    def verified() -> list[bool]:
        return [subprocess.run(["sh", "-c", command], cwd=out, check=False).returncode == 0 for command in commands]

    assert verified() == [True, True]
    with (out / one("_image.tar").name).open("ab") as file:
        file.write(b"x")
    assert verified() == [True, False]
    sums = "".join(f"{sha256(path.read_bytes())}  {path.name}\n" for path in out.glob("kvagent*"))
    (out / "SHA256SUMS").write_text(sums)
    assert verified() == [False, True]
