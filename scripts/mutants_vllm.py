#!/usr/bin/env python3
"""mutants vllm [VERSION] [WORD...]: checks that tests catch known faults of the vLLM connector.

Each mutant breaks a copy of the connector, one at a time; a given test must fail with a given
message. Runs all mutants, or those whose name contains all WORDs. First, every mutant must apply.
vLLM is imported once; each mutant runs in a process forked from that, with the bytecode of what it
does not change. KVAGENT_SKIP_VLLM=1 skips them.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
AT_ONCE = 2
COPIED = ("kvagent", "tests")
LONGEST_S = 200  # for the tests of one mutant; hanging tests count as caught
WARM = (
    "torch", "pytest", "vllm", "vllm.config", "vllm.lora.request", "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.structured_output", "vllm.v1.worker.gpu.kv_connector",
    "vllm.v1.worker.kv_connector_model_runner_mixin",
)  # fmt: skip


@dataclass
class Mutant:
    """A fault: the change of a file, the tests (pytest's -k) that catch it, and their message."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    says: str
    where: str = "tests/vllm"
    """The file or folder of the tests."""


WEIGHTS = "tests/test_vllm_weights.py"
IDENTITY = "tests/vllm/test_identity.py"
WAITS = "tests/test_vllm_waits.py"
CELLS = "tests/test_vllm_cells.py"
LAYERWISE = "tests/vllm/test_layerwise.py"
SYNC = "tests/vllm/test_sync_loads.py"
LAZY = "tests/test_vllm_lazy.py"
TIER = "tests/test_tier.py"
NODES = "tests/vllm/test_nodes.py"
CONTRACT = "tests/vllm/test_tier_contract.py"
STATES = "tests/vllm/test_states.py"
PLANNED_STATES = "tests/test_vllm_states.py"
ADAPTERS = "tests/test_vllm_adapters.py"
DRAFTS = "tests/vllm/test_drafts.py"
EVENTS = "tests/test_vllm_events.py"
MUTANTS = [
    Mutant("the tier gives a save up without revoking it", "tier/jobs.py",
        "            memory.words.revoke(job.word)\n", "            pass\n",
        "neither_holds_rows", "with the bytes of another chunk", where=TIER),
    Mutant("the tier copies on what did not verify", "tier/jobs.py",
        "if status == BlockStatus.OK:", "if status >= BlockStatus.OK:",
        "is_not_stored_does_not_arrive", "assert", where=TIER),
    Mutant("the tier's space leaves the layout of chunks out", "tier/identity.py",
        "identified = identity_pairs(pairs | layout)", "identified = identity_pairs(pairs)",
        "chunks_of_another_layout", "assert", where=CONTRACT),
    Mutant("a reset leaves the tier in the space of the old weights", "tier/manager.py",
        "        if self._generations.after_reset():\n            self._move()\n",
        "        self._generations.after_reset()\n",
        "means_other_weights", "assert", where=CONTRACT),
    Mutant("a state is loaded at the wrong boundary", "scheduler/loads.py",
        "hashes[(at + 1) * scale - 1 : stop * scale : scale]",
        "hashes[(at + 1 - (group in self._geometry.states)) * scale - 1 :][: stop - at]",
        "states_after_generated_tokens", "state after", where=STATES),
    Mutant("all of a prompt is loaded in a model with a window", "scheduler/loads.py",
        "request.num_tokens - self._windowed", "request.num_tokens - bool(self._geometry.states)",
        "last_token_of_a_prompt", "position 64 of 127", where="tests/vllm/test_requests.py"),
    Mutant("a load without a block for its state counts", "scheduler/loads.py",
        " or table[last - 1].is_null:", ":",
        "without_a_block_for_its_state", "assert", where=PLANNED_STATES),
    Mutant("an adapter is known by its name", "guests/adapters.py",
        "Adapted(tracked.request, content.digest)", "Adapted(tracked.request, b'')",
        "different_adapters_never_share", "assert", where=ADAPTERS),
    Mutant("an adapter's files may change while vLLM reads them", "guests/adapters.py",
        "settled and self.states(request) == before", "settled",
        "another_at_the_load", "assert", where=ADAPTERS),
    Mutant("the last block before a draft's next token is shared", "guests/drafts.py",
        "hashlib.sha256(hashes[i] + following)", "hashlib.sha256(hashes[i])",
        "part_after_a_block", "assert", where=DRAFTS),
    Mutant("over nodes, the greatest hit counts", "guests/nodes.py",
        "if (least := min(found)) > question.own:", "if (least := question.tokens) > question.own:",
        "least_of_what_the_nodes_have", "assert", where=NODES),
    Mutant("over nodes, parts with other weights are one engine", "guests/parts.py",
        '_OWN = (PAIR, GENERATION, UNSHARED, "resolved")', '_OWN = (PAIR, GENERATION, UNSHARED, "resolved", "weights")',
        "parts_of_other_engines", "assert", where=NODES),
    Mutant("a step counts though a layer has not waited", "guests/sync.py",
        "return not missing", "return True",
        "a_layer_that_was_expected_to_wait", "AssertionError|assert", where=LAYERWISE),
    Mutant("the layers of a cell lie in the order of a list", "guests/cells.py",
        "        ordered = checked_layers(names, stage)\n", "        ordered = list(names)\n",
        "every_byte", "layer 0, head 0, block", where=CELLS),
    Mutant("a request whose synchronous load failed computes on", "guests/sync.py",
        "            if self._preemption.preempt(name):\n",
        "            if not self._preemption.publish(name, own):\n",
        "changes_between_promise_and_load and async", "AssertionError: (warm|twin)", where=SYNC),
    Mutant("other requests hit the blocks of a synchronous load", "internals.py",
        "        self._scheduler.kv_cache_manager.block_pool.evict_blocks({block.block_id for block in blocks})\n", "",
        "changes_between_promise_and_load and async", "AssertionError", where=SYNC),
    Mutant("a block that was reused is saved as what it held before", "guests/lazy.py",
        "self.unsaved.pop(block.block_id, None) is not None", "self.unsaved.get(block.block_id) is not None",
        "was_reused", "is stored with the content", where=LAZY),
    Mutant("blocks of old weights are saved when their eviction comes near", "guests/lazy.py",
        " and not self._blocks.is_stale(block):\n            return unsaved", ":\n            return unsaved",
        "old_weights", "is stored with the content", where=LAZY),
    Mutant("a load that failed counts as good", "worker/side.py",
        "failed = not inflight.cancelled and (not statuses or any(statuses))", "failed = not statuses",
        "fails_in_one_rank", "a failed load counts as good"),
    Mutant("an error of the connector's leaves a call of vLLM's", "boundary.py",
        "            one.failed(self, name, error, *args, **kwargs)\n", "            raise\n",
        "one_error_is_forgiven", "RuntimeError: planted", where="tests/vllm/test_boundary.py"),
    Mutant("save boundary without subtracting placeholders", "scheduler/saves.py",
        "+ scheduled - request.num_output_placeholders", "+ scheduled",
        "what_may_be_taken_back", "placeholders count as tokens"),
    Mutant("the pins of a save are not taken", "scheduler/requests.py",
        "        self.pool.touch(blocks)\n",
        "        if load:\n            self.pool.touch(blocks)\n",
        "abort_while_saving", "a frozen agent may still read"),
    Mutant("memory is released after a deadline", "connector.py",
        "        if self._part.leave():\n", "        if self._part.leave() or True:\n",
        "memory_is_kept", "memory was given up without a fence"),
    Mutant("memory is released at the end, without a fence", "connector.py",
        "        if worker is not None and not worker.leave():\n",
        "        if worker is not None and not worker.leave() and False:\n",
        "memory_is_kept", "memory was given up without a fence"),
    Mutant("a load is reported before it arrived", "worker/side.py",
        "        self.jobs[plan.job] = inflight\n",
        ("        self.jobs[plan.job] = inflight\n        if isinstance(plan, LoadJob):\n"
         "            inflight.reported = True\n            self.pending_results.received.add(plan.request)\n"),
        "not_reported_before", "reported before it arrived"),
    Mutant("what precedes a failed block counts as good with windows too", "geometry.py",
        "return len(groups) == 1 and not window(groups[0].kv_cache_spec)", "return len(groups) == 1",
        "precedes_a_failed_block", "computed on without its window"),
    Mutant("an agent that answers no ping is waited for", "scheduler/side.py",
        "waiting and (self.waiting() or agent.awaited()) and", "waiting and self.waiting() and",
        "frozen_one_once", "answers no ping is waited for", where=WAITS),
    Mutant("the lease of a late answer is kept", "scheduler/loads.py",
        "            self.release(leases)\n", "            pass\n",
        "frozen_one_once", "an agent without leases", where=WAITS),
    Mutant("a save is not revoked at reset_prefix_cache", "scheduler/side.py",
        "        self._revokes = self.take_revokes() + self.saves.revoke(awaited=True)\n", "        return\n",
        "pins_go", "reset_prefix_cache"),
    Mutant("blocks of a reset are free before their saves are revoked", "scheduler/side.py",
        "        self.blocks.pool.touch(self._held)\n", "        self._held = []\n",
        "not_free_in_the_step_that_revokes", "would reuse blocks", where="tests/test_vllm_sides.py"),
    Mutant("a call that changes weights is not observed", "weight_changes.py",
        "        connector.before_weights_call(name)\n", "        pass\n",
        "calls_through_the_engine_core", "startswith"),
    Mutant("a reset of vLLM's own cache is ignored though weights change unobserved", "scheduler/side.py",
        "        self._was_reset = self.generations.counts_resets\n", "        pass\n",
        "follow_weights_that_changed_unobserved", "blocks of other weights|finds",
        where="tests/test_vllm_new_weights.py"),
    Mutant("a job goes out in another space than it was planned for", "worker/side.py",
        "(session.boot, session.registered.space) == (plan.boot, plan.space)", "session.boot == plan.boot",
        "planned_before_the_change", "goes out under the new identity"),
    Mutant("a file may change between its load and its digest", "../files.py",
        "state.changed >= since_ns and", "state.changed < 0 and",
        "since_the_process_began", "is None", where=WEIGHTS),
    Mutant("the weights of a draft model do not count", "space.py",
        "    if digest is None or draft is None or", "    if True or",
        "draft_model_count", "AssertionError", where=WEIGHTS),
    Mutant("weak hashes while tenants share", "space.py",
        "    if tenant and algorithm", "    if not tenant and algorithm",
        "can_be_forged", "prefix_caching_hash_algo|DID NOT RAISE", where="tests/test_vllm_parts.py"),
    Mutant("items are keyed by client names", "guests/media.py",
        "tracked.request = Keyed(request, items, self._hash_tokens)", "pass",
        "clients_name_alike", "taken for another of that name"),
    Mutant("a name of two contents stays in use", "guests/media.py",
        "if not content or (digest and content != digest):", "if not content:",
        "two_contents_in", "media_bypassed"),
    Mutant("a value of an unknown type counts as its type", "space.py",
        "        self.unknown.append(f\"{path} {why}\")\n", "",
        "unknown_type", "KeyError", where=IDENTITY),
    Mutant("an option's file counts by its name", "space.py",
        "return files.digest(files.files(place, every=True), [], None if new else self._since)", "return str(place)",
        "an_option_names", "AssertionError", where=IDENTITY),
    Mutant("what an agent held stays told after its end", "guests/events.py",
        "        self._leaving = len(self._published) > 0\n        self.tokens", "        self.tokens",
        "from_the_leaf_on", "assert", where=EVENTS),
]  # fmt: skip


def mutated(mutant: Mutant, package: Path) -> tuple[Path, str]:
    """Return a mutant's file and its broken text. Exit if the mutant does not apply."""
    target = package / "vllm" / mutant.file
    text = target.read_text()
    if text.count(mutant.old) != 1:
        sys.exit(f"mutant {mutant.name!r}: its text is {text.count(mutant.old)} times in {mutant.file}")
    return target, text.replace(mutant.old, mutant.new)


def compiled(mutants: list[Mutant], folder: Path) -> Path:
    """Return a copy of the package and its tests with the bytecode that the mutants' tests need."""
    ignore = shutil.ignore_patterns("*_cache", "__pycache__", "gpu")
    tree = folder / "python"
    for part in COPIED:
        shutil.copytree(ROOT / "python" / part, tree / part, ignore=ignore)
    child = os.fork()
    if child == 0:
        sys.dont_write_bytecode = False
        run_pytest(tree, folder / "log", "--collect-only", *{mutant.where for mutant in mutants})
    if os.waitpid(child, 0)[1]:
        sys.exit((folder / "log").read_text(errors="replace")[-3000:])
    return tree


def broken(mutant: Mutant, whole: Path, folder: Path) -> Path:
    """Return a copy of the package and its tests with one fault."""
    tree = folder / "python"
    for part in COPIED:
        shutil.copytree(whole / part, tree / part)
    target, text = mutated(mutant, tree / "kvagent")
    target.write_text(text)
    for bytecode in (target.parent / "__pycache__").glob(f"{target.stem}.*"):
        bytecode.unlink()  # it may pass for that of the new text: it tells the file's size, and its time in seconds
    return tree


@dataclass
class Run:
    """The tests of a mutant, in a fork of this process, which has not imported the package."""

    mutant: Mutant
    begin: float
    folder: tempfile.TemporaryDirectory[str]
    child: int = 0

    @property
    def log(self) -> Path:
        """Return the file of the tests' output."""
        return Path(self.folder.name) / "log"


def start(mutant: Mutant, whole: Path) -> Run:
    """Break a copy and start the mutant's tests on it."""
    folder = tempfile.TemporaryDirectory(prefix="kvagent-mutant-")
    run = Run(mutant, time.monotonic(), folder)
    tree = broken(mutant, whole, Path(folder.name))
    run.child = os.fork()
    if run.child == 0:
        run_pytest(tree, run.log, "-x", mutant.where, "-m", "not engine", "-k", mutant.tests)
    return run


def run_pytest(tree: Path, log: Path, *arguments: str) -> None:
    """Run pytest in this process and exit with its status."""
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    import pytest

    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tree), "-W", "ignore"]
    status = pytest.main([*options, *arguments])
    sys.stdout.flush()
    os._exit(int(status))


def ended(run: Run) -> int | None:
    """Return pytest's status, -1 if it hung, None if it still runs."""
    done, status = os.waitpid(run.child, os.WNOHANG)
    if done:
        return os.waitstatus_to_exitcode(status)
    if time.monotonic() < run.begin + LONGEST_S:
        return None
    os.killpg(run.child, 9)
    os.waitpid(run.child, 0)
    return -1


def caught(run: Run, status: int) -> bool:
    """Return whether the tests caught the fault, and print it."""
    text = run.log.read_text(errors="replace")
    run.folder.cleanup()
    name = run.mutant.name
    if status not in (-1, 0, 1):
        sys.exit(f"{text[-3000:]}\nmutant {name!r}: the tests did not run")
    failed = re.findall(r"^FAILED \S+::(\S+)", text, re.MULTILINE)
    errors = "\n".join(re.findall(r"^E .*", text, re.MULTILINE))
    said = re.search(run.mutant.says, errors)
    good = bool(failed and said)
    what = f"{failed[0]}: {said.group(0)[:70]}" if failed and said else f"status {status}, {failed}\n{errors[-1500:]}"
    print(f"{'caught' if good else 'ALIVE '}  {name}  [{what}]  {time.monotonic() - run.begin:.0f} s", flush=True)
    return good


def run_all(mutants: list[Mutant], whole: Path) -> list[str]:
    """Run the mutants, AT_ONCE at a time. Return the names of those that no test caught."""
    waiting, runs, alive = list(mutants), list[Run](), list[str]()
    while waiting or runs:
        while waiting and len(runs) < AT_ONCE:
            runs.append(start(waiting.pop(0), whole))
        for run in list(runs):
            status = ended(run)
            if status is not None:
                runs.remove(run)
                alive += [] if caught(run, status) else [run.mutant.name]
        time.sleep(0.02)
    return alive


def enter(version: str) -> None:
    """Restart this script in the interpreter of the environment with vLLM."""
    command = [str(ROOT / "scripts" / "env"), "vllm", *([version] if version else [])]
    python = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    inside = {"MUTANTS_VLLM_INSIDE": "1", "KVAGENT_BINARY": str(ROOT / "bin" / "kvagent")} | dict(os.environ)
    inside |= {"KVAGENT_REQUIRE_AGENT": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    inside |= {"VLLM_CACHE_ROOT": str(Path(python).parents[1] / "cache"), "OMP_NUM_THREADS": "1"}
    inside |= {"VLLM_LOGGING_LEVEL": "ERROR", "KVAGENT_DOCS": str(ROOT / "docs")}
    os.execve(python, [python, "-B", __file__, *sys.argv[1:]], inside)  # noqa: S606


def main() -> None:
    """Run the chosen mutants."""
    arguments = sys.argv[1:]
    version = arguments.pop(0) if arguments and re.fullmatch(r"\d+\.\d+\.\d+", arguments[0]) else ""
    if os.environ.get("KVAGENT_SKIP_VLLM") == "1":
        print("!!!! KVAGENT_SKIP_VLLM=1: the mutants of the vLLM connector are LEFT OUT", file=sys.stderr)
        return
    if "MUTANTS_VLLM_INSIDE" not in os.environ:
        for mutant in MUTANTS:
            mutated(mutant, ROOT / "python" / "kvagent")
        enter(version)
    for module in WARM:
        importlib.import_module(module)
    chosen = [one for one in MUTANTS if all(word in one.name for word in arguments)]
    with tempfile.TemporaryDirectory(prefix="kvagent-mutants-") as folder:
        alive = run_all(chosen, compiled(chosen, Path(folder)))
    print(f"{len(chosen) - len(alive)} of {len(chosen)} mutants caught")
    if alive or not chosen:
        sys.exit(1)


if __name__ == "__main__":
    main()
