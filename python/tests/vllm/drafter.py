"""A drafter that is sometimes right and sometimes wrong. For vLLM's method ``custom_class``."""

from __future__ import annotations

from collections import Counter
from typing import Any


class Drafter:
    """Knows the model's output for the tests' prompts (``says``), and is wrong in every third
    token.
    """

    says: dict[tuple[int, ...], list[int]] = {}  # noqa: RUF012  filled by the test
    taken: Counter[int] = Counter()  # noqa: RUF012
    """How often a step gave a request so many tokens: more than one are drafts that were right."""

    def __init__(self, config: Any) -> None:
        self._drafts = int(config.speculative_config.num_speculative_tokens)

    def load_model(self, model: Any) -> None:
        """Do nothing: there is no model."""

    def propose(self, sampled: list[list[int]], lengths: Any, tokens: Any, **_: Any) -> list[list[int]]:
        self.taken.update(len(one) for one in sampled)
        return [
            self._guess(tokens[row, : int(lengths[row])].tolist()) if one else [] for row, one in enumerate(sampled)
        ]

    def _guess(self, known: list[int]) -> list[int]:
        for prompt, answer in self.says.items():
            said = len(known) - len(prompt)
            if said >= 0 and tuple(known[: len(prompt)]) == prompt:
                return [
                    token if (said + i) % 3 else token % 7 + 5
                    for i, token in enumerate(answer[said : said + self._drafts])
                ]
        return []
