"""The kit's results as a page for docs/measurements/."""

from __future__ import annotations

import statistics
import textwrap
from typing import TYPE_CHECKING, Any

from tests.gpu.engines import KINDS, REPEATS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

COLUMNS = 100  # of text in the tree
TARGET_HIT = 1.1  # of the better one of vLLM's own
TARGET_SAVES = 1.01  # of an engine without a connector


def page(results: dict[str, Any], name: str) -> str:
    """Return the page of results whose JSON has that name."""
    host = results["host"]
    conditions = ", ".join(f"{key} {value}" for key, value in host.items() if key not in {"date", "gpu"})
    parts = [
        f"# {host['date']}: {host['gpu']}\n",
        wrapped(f"{conditions}. [Raw]({name}.json). Times in ms, rates in GiB/s unless it says otherwise."),
        *proof(results["proof"]),
        *processors(results["processors"]),
        "## Engines\n",
        engines(results["engines"]),
        "| target | |\n|---|---|\n" + "".join(f"| {what} | {said} |\n" for what, said in targets(results["engines"])),
    ]
    if results["not_run"]:
        parts.append(wrapped(f"Not run, or without an end: {', '.join(results['not_run'])}."))
    return "\n".join(parts)


def wrapped(text: str) -> str:
    return textwrap.fill(text, COLUMNS, break_long_words=False, break_on_hyphens=False) + "\n"


def proof(checks: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the proof's table, and what missed its target."""
    if not checks:
        return
    yield "## Proof, and the raw link\n"
    yield "| check | |\n|---|---|\n" + "".join(
        f"| {check['name']} | {'' if check['ok'] else '**failed** '}{check['text'].replace('|', '/')} |\n"
        for check in checks
    )
    missed = [
        f"{check['name']}: {target['name']}: {target['got']:.3g} instead of {target['want']:.3g}"
        for check in checks for target in check.get("targets") or [] if not target["met"]
    ]  # fmt: skip
    yield wrapped(f"Targets that were missed: {'; '.join(missed) or 'none'}.")


def processors(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the table of ``kvbench bench transfer``: copies on processors, and a core's sums."""
    if not rows:
        return
    yield "## Copies on processors\n"
    names = list(rows[0])
    lines = [names, ["---"] * len(names), *([str(row[name]) for name in names] for row in rows)]
    yield markdown(lines)


def markdown(lines: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def engines(rows: list[dict[str, Any]]) -> str:
    """Return the table of engines; what an engine did not come to is empty."""
    lines = [["", *(KINDS[row["kind"]].title for row in rows)], ["---", *("--:" for _ in rows)]]

    def line(title: str, say: Callable[[dict[str, Any]], str]) -> None:
        def cell(row: dict[str, Any]) -> str:
            try:
                return say(row)
            except KeyError:
                return ""

        cells = [cell(row) for row in rows]
        if any(cells):
            lines.append([title, *cells])

    def prompt(tokens: str, say: Callable[[dict[str, Any]], str]) -> Callable[[dict[str, Any]], str]:
        return lambda row: say(row["prompts"][tokens])

    for tokens in sorted({tokens for row in rows for tokens in row["prompts"]}, key=int):
        line(f"first token of {tokens} tokens, computed", prompt(tokens, lambda one: str(one["computed"])))
        line("hit", prompt(tokens, lambda one: spread(one["hit"])))
        line("hits with the tokens of before; log probabilities apart",
             prompt(tokens, lambda one: f"{one['same_tokens']} of {REPEATS}; {one['most_apart']:.1g}"))  # fmt: skip
    line("a batch, computed", lambda row: str(row["batch_computed"]))
    line("a batch, hit", lambda row: spread(row["batch_hit"]))
    for title in ("alone", "beside hits", "beside new"):
        line(f"decode {title}: whole; gap p50, p99", decode(f"decode_{title.replace(' ', '_')}"))
    for pace in ("auto", "off"):
        line(f"decode beside saves, `--pace {pace}`: whole; gap p50, p99; GiB/s", saves(pace))
    for direction in ("save", "load"):
        line(f"{direction}s by stage, since the agent began: mean, ms", stages(direction))
    line("start", lambda row: f"{row['start_s']} s")
    return markdown(lines)


def decode(key: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: gaps(row[key])


def saves(pace: str) -> Callable[[dict[str, Any]], str]:
    def say(row: dict[str, Any]) -> str:
        one = row["beside_copies"][pace]
        return f"{gaps(one)}; {one['gib_s']}"

    return say


def stages(direction: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: "; ".join(
        f"{one['stage']} {one['mean_ms']:.2g}" for one in row["stages"] if one["direction"] == direction
    )


def spread(values: list[float]) -> str:
    return f"{min(values):.0f} to {max(values):.0f}"


def gaps(row: dict[str, Any]) -> str:
    return f"{row['ms']:.0f}; {row['gap_p50']}, {row['gap_p99']}"


def targets(rows: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yield what kvagent's figures are of those of the others."""
    of = {row["kind"]: row for row in rows}

    def ratio(what: str, mine: list[float], others: list[list[float]], most: float) -> tuple[str, str]:
        if not mine or not all(others) or not others:
            return what, "not measured"
        got = statistics.median(mine) / min(statistics.median(one) for one in others)
        return what, f"{got:.2f}, at most {most}: {'met' if got <= most else 'NOT met'}"

    own = [of.get("offloading", {}), of.get("simple", {})]
    for tokens in of.get("kvagent", {}).get("prompts", {}):
        yield ratio(
            f"hit of {tokens} tokens, of the better one of vLLM's own",
            of["kvagent"]["prompts"][tokens]["hit"],
            [one.get("prompts", {}).get(tokens, {}).get("hit", []) for one in own], TARGET_HIT,
        )  # fmt: skip
    yield ratio("hits of a batch, of the better one of vLLM's own", of.get("kvagent", {}).get("batch_hit", []),
                [one.get("batch_hit", []) for one in own], 1.0)  # fmt: skip
    times = [[one["decode_beside_new"]["ms"]] if "decode_beside_new" in one else []
             for one in (of.get("kvagent", {}), of.get("none", {}))]  # fmt: skip
    yield ratio("decode beside new prompts, of an engine without a connector", times[0], times[1:], TARGET_SAVES)
