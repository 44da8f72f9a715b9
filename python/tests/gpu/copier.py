"""Saves as fast as the agent takes them, for an engine to decode beside.

``python -m tests.gpu.copier SOCKETS BLOCK_BYTES [--cpu]`` is an engine of its own, with a tensor on
the GPU. It prints a line when it begins, and GiB/s as JSON when its input ends.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS = 128  # of the tensor
JOBS = 4  # at once, each of so many of the blocks
HASH_BYTES = 32


class Copier:
    """A worker that saves blocks of new hashes, and may hold in the pool what its tensor has."""

    def __init__(self, sockets: str, block_bytes: int, device: str) -> None:
        import torch

        from kvagent import messages as m
        from kvagent.registration import Registration, identity_pairs
        from kvagent.session import Session
        from kvagent.vllm.worker.memory import memory
        from kvagent.vllm.worker.side import make_clock
        from kvagent.wire import packed, section

        self._section, self._packed, self._done = section, packed, m.Done
        self._tensor = torch.zeros(BLOCKS, block_bytes, dtype=torch.uint8, device=device)
        self._memory = memory({"layer": self._tensor}, [["layer"]], BLOCKS)
        self._sync = make_clock(self._memory.device)
        words = self._sync.words
        common: dict[str, Any] = {
            "instance": "copier", "identity": identity_pairs({"model": "copier", "dtype": "none", "tenant": ""}),
            "groups": (m.Group(16, BLOCKS),), "hash_tokens": 16,
        }  # fmt: skip
        self._scheduler = Session.connect(f"{sockets}/session.sock", timeout_s=20)
        self._scheduler.register(Registration(**common, role=m.Role.SCHEDULER))
        self._worker = Session.connect(f"{sockets}/session.sock", timeout_s=20)
        self._epoch = self._worker.register(
            Registration(
                **common, role=m.Role.WORKER, sync=words.sync(0), held=self._memory.held,
                regions=[(words.memory.region(0), words.memory.fd), *self._memory.regions],
            )
        ).epoch  # fmt: skip
        self._worker.send(m.Budget(2 * BLOCKS * block_bytes))
        self._block_bytes, self._jobs, self.saved = block_bytes, 0, 0

    def copy(self) -> None:
        """Keep its jobs running, and count what they saved."""
        many = BLOCKS // JOBS
        while len(self._worker.jobs) < JOBS:
            first = self._jobs * many
            hashes = [(first + i).to_bytes(HASH_BYTES, "little") for i in range(many)]
            blocks = [(first + i) % BLOCKS for i in range(many)]
            revoke = self._jobs % self._sync.words.revokes
            run = self._packed([self._section(0, b"", hashes, blocks)], many)
            self._worker.save(run, epoch=self._epoch, step=0, revoke=revoke)
            self._jobs += 1
        select.select([self._worker], [], [], 0.1)
        for event in self._worker.poll():
            if isinstance(event, self._done):
                self.saved += event.statuses.count(0) * self._block_bytes


@contextlib.contextmanager
def copying(sockets: str, block_bytes: int, *, cpu: bool) -> Iterator[dict[str, float]]:
    """Run a copier; afterwards the result has its GiB/s."""
    command = [sys.executable, "-m", "tests.gpu.copier", sockets, str(block_bytes), *(["--cpu"] if cpu else [])]
    result: dict[str, float] = {}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline(), "no copier"
            yield result
            said, _ = process.communicate(timeout=60)
            result.update(json.loads(said))
        finally:
            process.kill()


def main() -> None:
    sockets, block_bytes, *rest = sys.argv[1:]
    copier = Copier(sockets, int(block_bytes), "cpu" if rest else "cuda:0")
    print("copies", flush=True)
    begin = time.monotonic()
    while not select.select([sys.stdin], [], [], 0)[0]:
        copier.copy()
    print(json.dumps({"gib_s": round(copier.saved / (time.monotonic() - begin) / 2**30, 2)}))


if __name__ == "__main__":
    main()
