"""A fake GPU that knows the right content of every slot of the KV cache.

It writes f(weights, prefix, position, layer, rank or head) into the slots of the tokens that a step
computes, and checks all earlier positions of the same request through the block table of that step.
Rejected draft tokens get other values.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.v1.kv_cache_interface import MambaSpec

PRIME = 16_777_213  # the greatest below 2**24: a float32 holds every number below it
SPARE = 64  # tokens after a request's last: steps in flight compute them before its end is known
REJECTED = 3.5  # no f is a fraction
GARBAGE = 7.25  # what is computed from a wrong value, where that is no error
WRONG = 1000  # the token that is sampled from it


@dataclass(eq=False)
class Sequence:
    """A request as the GPU knows it: all its tokens, including future ones, and the rolling hash of
    each prefix.

    ``kind`` is what else its KV depends on, such as a salt.
    """

    prompt: list[int]
    max_tokens: int
    kind: str = ""
    tokens: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        state = 7 + zlib.crc32(self.kind.encode()) % PRIME
        for i in range(len(self.prompt) + self.max_tokens + SPARE):
            token = self.prompt[i] if i < len(self.prompt) else state % 500 + 3
            state = (state * 31 + token + 1) % PRIME
            self.tokens.append(token)
            self.hashes.append(state)


@dataclass
class Part:
    """A request's part of a step."""

    name: str
    begin: int
    """Its first position, as the scheduler knows it: with draft tokens under way it may be too
    far.
    """
    scheduled: int
    drafts: int
    tables: tuple[list[int], ...]
    samples: bool
    fresh: bool
    """The scheduler says where it begins: it is new, or was resumed."""
    early: bool = False
    """Whether a layer found wrong bytes when it was its turn."""


class Gpu:
    """The GPU. Each rank has its own caches; with ``split``, its own heads of a model that is the
    same for any number of ranks.
    """

    def __init__(self, kv: Any, caches: list[dict[str, Any]], *, split: bool = False) -> None:
        self.split = split
        self.kv = kv
        self.caches = caches
        self.weights = 0
        self.taints = False
        """Whether what is computed from wrong values is wrong too, as on a real one, instead of an
        error: where an engine may compute from bytes that did not come, if it discards the result.
        """
        self.draft = ""
        """A layer whose KV depends on the next token too."""
        self.sequences: dict[str, Sequence] = {}
        self.bad: list[str] = []
        self.checked = 0
        self.rejected = 0
        self._at: dict[str, int] = {}

    def run(self, part: Part) -> list[int]:
        """Compute a part; return the output tokens."""
        sequence = self.sequences[part.name]
        begin = part.begin if part.fresh else self._at[part.name]
        known = begin + part.scheduled - part.drafts
        accepted = sequence.hashes[known] % (part.drafts + 1)
        self.rejected += part.drafts - accepted
        right = [self._compute(part, sequence, begin, known + accepted, rank) for rank in range(len(self.caches))]
        self._at[part.name] = known + accepted
        tokens = sequence.tokens[known : known + accepted + 1] if part.samples else []
        return tokens if all(right) and not part.early else [WRONG for _ in tokens]

    def reads(self, part: Part, rank: int, layer: str, step: list[Part]) -> None:
        """Let a layer of the only group read what it computes from, before the steps' kernels run.

        What it reads too early taints the part. A layer writes what the ``step``'s parts compute
        before any of them reads it.
        """
        sequence = self.sequences[part.name]
        begin = part.begin if part.fresh else self._at[part.name]
        (spec,) = self.kv.kv_cache_groups
        size, number = spec.kv_cache_spec.block_size, spec.layer_names.index(layer)
        positions = torch.arange(0, begin)
        table = torch.tensor(part.tables[0], dtype=torch.int64)
        view = self.caches[rank][layer]
        hashes = torch.tensor(sequence.hashes[:begin], dtype=torch.int64)
        want = ((hashes * 7 + number * 13 + self.weights * 1009 + rank * 29) % PRIME).to(torch.float32)
        got = view[table[positions // size], :, positions % size]
        wrong = (got != want[:, None, None]).flatten(1).any(1)
        slots = table[positions // size] * size + positions % size
        part.early |= bool((wrong & ~torch.isin(slots, self._written(step, size))).any())

    def _written(self, step: list[Part], size: int) -> torch.Tensor:
        """Return the slots of the only group that a step writes."""
        written = [torch.empty(0, dtype=torch.int64)]
        for part in step:
            begin = part.begin if part.fresh else self._at[part.name]
            positions = torch.arange(begin, begin + part.scheduled)
            table = torch.tensor(part.tables[0], dtype=torch.int64)
            written.append(table[positions // size] * size + positions % size)
        return torch.cat(written)

    def _compute(self, part: Part, sequence: Sequence, begin: int, end: int, rank: int) -> bool:
        """Write what one rank computes. Return whether it was right."""
        right = True
        far = begin + part.scheduled
        every = torch.tensor(sequence.hashes[: far + 1], dtype=torch.int64)[:, None] * 7
        for group, spec in enumerate(self.kv.kv_cache_groups):
            if isinstance(spec.kv_cache_spec, MambaSpec):
                right &= self._compute_states(part, sequence, begin, rank, group)
                continue
            low = _first_needed(spec.kv_cache_spec, begin)
            size, old = spec.kv_cache_spec.block_size, begin - low
            positions = torch.arange(low, far)
            table = torch.tensor(part.tables[group], dtype=torch.int64)
            blocks, slots = table[positions // size], positions % size
            read, written = (blocks[:old], slice(None), slots[:old]), (blocks[old:], slice(None), slots[old:])
            hashes, next_hashes = every[low:-1], every[low + 1 :]
            for number, layer in enumerate(spec.layer_names):
                view = self.caches[rank][layer]
                heads = view.shape[1]
                seed = (number + 8 * group) * 13 + self.weights * 1009
                part_of: Any = torch.arange(rank * heads, rank * heads + heads) if self.split else rank
                of = next_hashes if layer == self.draft else hashes
                # One value of a token for all heads where they are equal.
                want = ((of + (part_of * 29 + seed)) % PRIME).to(torch.float32)[:, :, None]
                different = view[read] != want[:old]
                self.checked += old
                failed = bool(different.any())
                if failed and self.taints:
                    right = False
                    want[:] = GARBAGE
                elif failed:
                    wrong = different.flatten(1).any(1)
                    at = int(positions[:old][wrong][0])
                    self.bad.append(
                        f"{part.name} rank {rank} {layer} position {at} of {begin}, {int(wrong.sum())} wrong"
                    )
                if end < far:
                    want[end - low :] = REJECTED
                view[written] = want[old:]
        return right

    def _compute_states(self, part: Part, sequence: Sequence, begin: int, rank: int, group: int) -> bool:
        """Compute on from the state after ``begin`` tokens, which is in the block of the last of
        them, and leave the next one in the block of the step's last token, as vLLM's workers do.
        """
        spec, end, table = self.kv.kv_cache_groups[group], begin + part.scheduled, part.tables[group]
        size = spec.kv_cache_spec.block_size
        for number, layer in enumerate(spec.layer_names):
            view = self.caches[rank][layer].view(torch.float32)

            def value(tokens: int, of: int = number) -> float:
                return float((sequence.hashes[tokens - 1] * 7 + (of + 8 * group) * 13 + rank * 29) % PRIME)

            if begin:
                self.checked += 1
                got = view[table[(begin - 1) // size]].flatten()
                if bool((got != value(begin) + self.weights * 1009 % PRIME).any()):
                    self.bad.append(f"{part.name} rank {rank} {layer} state after {begin} tokens")
            view[table[(end - 1) // size]] = value(end) + self.weights * 1009 % PRIME
        return True


def _first_needed(spec: Any, begin: int) -> int:
    """Return the first position that the tokens from ``begin`` on attend to."""
    if window := getattr(spec, "sliding_window", None):
        return max(0, begin - int(window) + 1)
    chunk = int(getattr(spec, "attention_chunk_size", None) or begin + 1)
    return begin // chunk * chunk
