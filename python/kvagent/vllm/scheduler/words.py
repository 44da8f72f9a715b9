"""The revocation words of an engine's workers, as its scheduler reaches them: through /proc, mapped."""

from __future__ import annotations

import mmap
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvagent.vllm.plan import WorkerWords


class OthersWords:
    """Maps every worker's words. OSError if one cannot be reached. ``close`` unmaps them."""

    def __init__(self, workers: Sequence[WorkerWords]) -> None:
        self._maps: list[mmap.mmap] = []
        self._words: list[memoryview] = []
        try:
            for worker in workers:
                fd = os.open(worker.path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    self._maps.append(mmap.mmap(fd, worker.size))
                finally:
                    os.close(fd)
                end = worker.revoke_off + 4 * worker.revokes
                self._words.append(memoryview(self._maps[-1])[worker.revoke_off : end].cast("I"))
        except BaseException:
            self.close()
            raise

    def revoke(self, index: int) -> None:
        """Revokes the save that names this word, in every worker."""
        for words in self._words:
            words[index] = 1

    def close(self) -> None:
        """Unmaps them. A second call does nothing."""
        for words in self._words:
            words.release()
        for mapped in self._maps:
            mapped.close()
        self._words, self._maps = [], []
