"""scripts/envs/vllm-uv: uv uses pip's indexes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "envs" / "vllm-uv"
CONFIGURED = """
:env:.extra-index-url='http://b/simple'
:env:.no-index='false'
freeze.timeout='10'
global.cert='/ca.pem'
global.extra-index-url='http://a/simple'
global.find-links='\\n/one\\n/two'
global.index-url='http://global/simple'
global.trusted-host='a b'
install.index-url='http://install/simple'
"""


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (
            {},
            {
                "UV_DEFAULT_INDEX": "http://install/simple", "UV_INDEX": "http://b/simple",
                "UV_FIND_LINKS": "/one,/two", "UV_INSECURE_HOST": "a b", "SSL_CERT_FILE": "/ca.pem",
                "UV_INDEX_STRATEGY": "unsafe-best-match",
            },
        ),
        (
            {"UV_INDEX_URL": "http://uv/simple", "UV_INDEX": "http://own/simple", "SSL_CERT_FILE": "/own.pem"},
            {
                "UV_INDEX_URL": "http://uv/simple", "UV_INDEX": "http://own/simple", "SSL_CERT_FILE": "/own.pem",
                "UV_FIND_LINKS": "/one,/two", "UV_INSECURE_HOST": "a b",
            },
        ),
    ],
)  # fmt: skip
def test_pips_indexes_are_uvs(tmp_path: Path, own: dict[str, str], expected: dict[str, str]) -> None:
    """Settings of uv itself win. Of pip's, a variable wins, then ``install``."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "configured").write_text(CONFIGURED)
    for name, script in (("python", f"cat {tmp_path}/configured"), ("uv", "echo arguments=$*; env")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    command = [sys.executable, str(SCRIPT), str(tmp_path), "pip", "install", "x"]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env={"PATH": os.environ["PATH"]} | own)
    said = dict(line.split("=", 1) for line in run.stdout.splitlines())
    assert said.pop("arguments") == "pip install x"
    assert {name: value for name, value in said.items() if name.startswith(("UV_", "SSL_"))} == expected
