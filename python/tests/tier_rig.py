"""The tier's thread with the real agent, without vLLM: rows of random bytes and orders."""

from __future__ import annotations

import mmap
import os
import random
from typing import TYPE_CHECKING, TypeVar

from kvagent.registration import identity_pairs
from kvagent.vllm.tier.courier import Courier
from kvagent.vllm.tier.identity import Space
from kvagent.vllm.tier.jobs import Rows
from kvagent.vllm.tier.options import parse
from kvagent.vllm.tier.questions import Answered, Ask, Finished, Key, Load, Store
from tests.agent import PATIENCE_S, eventually

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from kvagent.vllm.tier.questions import Result

ROWS = 64
ROW_BYTES = 8192
TOKENS = 16
# A machine that stands still for a moment is not taken for a slow agent. Tests of limits set
# their own.
PATIENT = {"lookup_age_ms": 1e3 * PATIENCE_S, "load_deadline_ms": 1e3 * PATIENCE_S}

_Result = TypeVar("_Result", Answered, Finished)


class Rig:
    """An engine's host region, and its tier's thread."""

    def __init__(
        self, folder: Path, instance: str = "rig", *, descriptor: bool = True, groups: int = 1, weights: str = "w",
        **options: object,
    ) -> None:  # fmt: skip
        self._fd = os.memfd_create("rows")
        os.ftruncate(self._fd, ROWS * ROW_BYTES)
        self._map = mmap.mmap(self._fd, ROWS * ROW_BYTES)
        self.view = memoryview(self._map).cast("B", (ROWS, ROW_BYTES))
        pairs = identity_pairs({"model": "m", "dtype": "d", "tenant": "", "weights": weights, "generation": ""})
        space = Space(pairs, "", groups, TOKENS, ())
        self.rows = Rows(self.view, self._fd if descriptor else None)
        given = {"socket_dir": str(folder), **PATIENT, **options}
        self.courier = Courier(parse(given), self.rows, space, instance)
        self._jobs = 0
        self.results: list[Result] = []

    def fill(self, row: int, seed: str) -> bytes:
        """Give a row random bytes."""
        content = random.Random(seed).randbytes(ROW_BYTES)
        self.flat[row * ROW_BYTES : (row + 1) * ROW_BYTES] = content
        return content

    @property
    def flat(self) -> memoryview:
        return memoryview(self._map)

    def row(self, row: int) -> bytes:
        return bytes(self.flat[row * ROW_BYTES : (row + 1) * ROW_BYTES])

    def ready(self) -> None:
        eventually(lambda: self.courier.loading and self.courier.saving, "a tier with an agent")

    def store(self, keys: Sequence[Key], rows: Sequence[int]) -> int:
        self._jobs += 1
        parents = [b"", *(key[:-4] for key in keys[:-1])]
        self.courier.post(Store(self._jobs, tuple(keys), tuple(rows), tuple(parents)))
        return self._jobs

    def load(self, keys: Sequence[Key], rows: Sequence[int], request: str = "r") -> int:
        self._jobs += 1
        self.courier.post(Load(self._jobs, request, tuple(keys), tuple(rows)))
        return self._jobs

    def ask(self, keys: Sequence[Key], request: str = "r") -> Answered:
        ask = Ask(request, 1, tuple(keys))
        self.courier.post(ask)
        return eventually(lambda: self._result(Answered, lambda one: one.ask is ask), "an answer")

    def finished(self, job: int) -> Finished:
        return eventually(lambda: self._result(Finished, lambda one: one.job == job), f"the end of job {job}")

    def _result(self, kind: type[_Result], wanted: Callable[[_Result], bool]) -> _Result | None:
        while not self.courier.results.empty():
            self.results.append(self.courier.results.get_nowait())
        found = next((one for one in self.results if isinstance(one, kind) and wanted(one)), None)
        if found is not None:
            self.results.remove(found)
        return found

    def close(self) -> None:
        self.courier.close()
        self.view.release()


def keys(name: str, count: int, group: int = 0) -> list[Key]:
    """Return the keys of a prompt's chunks."""
    return [f"{name}/{i}".encode().ljust(32, b".") + group.to_bytes(4, "big") for i in range(count)]
