"""The driver calls, byte by byte, against a C library with the same prototypes."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from kvagent.cuda import CudaDriver, CudaError, export
from kvagent.messages import Region, RegionKind

MALLOC, VIRTUAL, PIECE = 0x7F5500000000, 0x7F6600000000, 2 << 20
UUID = bytes([30]) * 16


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: the calls of the CUDA driver are NOT TESTED")
    target = tmp_path_factory.mktemp("cuda") / "libfake.so"
    source = Path(__file__).with_name("cuda") / "driver.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", target, source], check=True)
    return target


def test_memory_of_cuda_malloc(library: Path) -> None:
    driver = CudaDriver(str(library))
    exported = export(driver, 1, MALLOC + 4096, 8192)
    assert exported.regions == ((Region(1, RegionKind.CUDA, 8192, 4096, b"i" * 64 + UUID), None),)
    assert not driver.shareable(MALLOC)


def test_virtual_memory(library: Path) -> None:
    driver = CudaDriver(str(library))
    exported = export(driver, 2, VIRTUAL + 512, PIECE)
    assert exported.offset == 512
    assert [region for region, _ in exported.regions] == [Region(2, RegionKind.CUDA_FD, PIECE, 0, UUID)] * 2
    names = [Path(f"/proc/self/fd/{fd}").readlink().name for _, fd in exported.regions]
    assert ["piece 0" in name for name in names] == [True, False]
    assert ["piece 1" in name for name in names] == [False, True]
    assert ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "held").value == 0
    fds = [fd for _, fd in exported.regions if fd is not None]
    exported.close()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)


def test_what_fails_is_named(library: Path) -> None:
    driver = CudaDriver(str(library))
    with pytest.raises(CudaError, match="cuPointerGetAttribute: CUDA_ERROR_INVALID_VALUE"):
        driver.legacy(1 << 40)
    with pytest.raises(CudaError, match="cuIpcGetMemHandle"):
        driver.ipc_handle(MALLOC + 1)


def test_a_call_that_the_driver_lacks_is_named() -> None:
    driver = CudaDriver("libc.so.6")  # has none of them
    with pytest.raises(CudaError, match=r"cuPointerGetAttribute.*install a newer CUDA driver"):
        export(driver, 1, MALLOC, 8192)
