"""What the running requests that are due have to be saved in a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvagent.vllm.scheduler.requests import Tracked
    from kvagent.vllm.scheduler.save_schedule import Due
    from kvagent.vllm.scheduler.saves import Saves


def collect(due: Due, saves: Saves, scheduled: Mapping[str, int], *, decode: bool) -> None:
    """Adds it, as far as there is room; who has to wait stays due.

    ``scheduled``: the tokens that the step computes, by request. ``decode``: also the blocks of answers.
    """
    kept: list[Tracked] = []
    filled: list[tuple[Tracked, int]] = []
    for tracked in due.take():
        if tracked.mixed:
            continue
        request = tracked.request
        tokens = scheduled.get(request.request_id)
        if tokens is None:  # it computes nothing now
            kept.append(tracked)
            continue
        tokens = settled(request, tokens)
        if not decode:
            tokens = min(tokens, request.num_prompt_tokens)
        filled.append((tracked, tokens))
    saves.pieces.add_all(filled)
    for tracked, tokens in filled:
        lacking = tracked.next_tokens - tokens
        if lacking <= 0:  # there was no room
            kept.append(tracked)
        elif decode or tracked.next_tokens <= tracked.request.num_prompt_tokens:
            due.later(tracked, lacking)
    saves.pieces.pin()
    due.keep(kept)


def settled(request: Any, scheduled: int) -> int:
    """The tokens whose KV is final once the step that computes ``scheduled`` more has ended.

    Not the placeholders of async scheduling, nor draft tokens: what is behind the known tokens may be taken back.
    """
    tokens: int = request.num_computed_tokens + scheduled - request.num_output_placeholders
    known: int = request.num_tokens
    return known if known < tokens else tokens  # noqa: FURB136  min() takes three times as long
