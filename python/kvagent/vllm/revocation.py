"""The workers' revocation words, which the scheduler maps through /proc."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.vllm.plan import WorkerInfo


class WorkerRevocation:
    """The mapped revocation words of all workers.

    OSError if one cannot be mapped: a worker in another container has another number here, or is
    not seen. ``close`` unmaps them.
    """

    def __init__(self, workers: Sequence[WorkerInfo]) -> None:
        self._maps: list[mmap.mmap] = []
        self._words: list[memoryview] = []
        try:
            for worker in workers:
                _check(Path(worker.path).stat(), worker)  # before a foreign file is opened
                fd = os.open(worker.path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    _check(os.fstat(fd), worker)
                    self._maps.append(mmap.mmap(fd, worker.size))
                finally:
                    os.close(fd)
                end = worker.revoke_off + 4 * worker.revokes
                self._words.append(memoryview(self._maps[-1])[worker.revoke_off : end].cast("I"))
        except BaseException:
            self.close()
            raise

    def revoke(self, index: int) -> None:
        """Revoke the save with this word, in every worker."""
        for words in self._words:
            words[index] = 1

    def close(self) -> None:
        """Unmap the words. Repeated calls do nothing."""
        for words in self._words:
            words.release()
        for mapped in self._maps:
            mapped.close()
        self._words, self._maps = [], []


def _check(found: os.stat_result, worker: WorkerInfo) -> None:
    """Raise OSError unless this is the file that the worker named."""
    if (found.st_dev, found.st_ino) != worker.file or found.st_size != worker.size:
        raise OSError(errno.ESTALE, "another file than the worker's", worker.path)
