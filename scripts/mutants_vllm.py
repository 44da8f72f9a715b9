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
TRANSFERS = "tests/test_vllm_transfers.py"
STARTER = "tests/test_starter.py"
WAITS = "tests/test_vllm_waits.py"
CELLS = "tests/test_vllm_cells.py"
LAYERWISE = "tests/vllm/test_layerwise.py"
SWITCHES = "tests/test_vllm_switches.py"
SWITCHED = "tests/vllm/test_switches.py"
ALGORITHMS = "tests/vllm/test_hash_algorithms.py"
SYNC = "tests/vllm/test_sync_loads.py"
LAZY = "tests/test_vllm_lazy.py"
MODES = "tests/vllm/test_modes.py"
FOREIGN = "tests/test_vllm_foreign.py"
TIER = "tests/test_tier.py"
NODES = "tests/vllm/test_nodes.py"
JOINT = "tests/test_vllm_nodes.py"
CONTRACT = "tests/vllm/test_tier_contract.py"
SPECS = "tests/test_vllm_specs.py"
STATES = "tests/vllm/test_states.py"
PLANNED_STATES = "tests/test_vllm_states.py"
ADAPTERS = "tests/test_vllm_adapters.py"
FOLLOWING = "tests/test_vllm_following.py"
DRAFTS = "tests/vllm/test_drafts.py"
TAILS = "tests/test_vllm_tails.py"
BACKENDS = "tests/vllm/test_backends.py"
PARTS = "tests/test_vllm_parts.py"
UNCACHED = "tests/vllm/test_uncached.py"
PROOF = "tests/vllm/test_tier_agent.py"
EVENTS = "tests/test_vllm_events.py"
COUNTERS = "tests/vllm/test_counters.py"
MUTANTS = [
    Mutant("an idle engine keeps its last counters", "connector.py",
        "if now < self._next_stats and not self._idle():", "if now < self._next_stats:",
        "idle_engine", "assert", where=COUNTERS),
    Mutant("the tier gives a save up without revoking it", "tier/saves.py",
        "                memory.revoke(job.word)\n", "                pass\n",
        "neither_holds_rows", "with the bytes of another chunk", where=TIER),
    Mutant("the tier copies on what did not verify", "tier/loads.py",
        "if status == BlockStatus.OK:", "if status >= BlockStatus.OK:",
        "is_not_stored_does_not_arrive", "assert", where=TIER),
    Mutant("the tier does not notice a stopped agent", "tier/courier.py",
        "        if self._load_port.stopped:\n            self._loads.abandon()\n",
        "        if self._load_port.stopped:\n",
        "neither_holds_rows", "did not come about", where=TIER),
    Mutant("the tier asks with one group for all", "tier/questions.py",
        "groups=bytes([group_of(ask.keys[0])])", "groups=bytes([0])",
        "several_groups", "assert", where=TIER),
    Mutant("a drain of the tier waits for a stopped agent", "tier/courier.py",
        "        if any(now >= one.deadline for one in self._drains):", "        if False:",
        "reset_does_not_wait", "did not come about", where=TIER),
    Mutant("the tier tries again what did not arrive", "tier/manager.py",
        "self._failed[key] = now + FAILED_S", "self._failed[key] = now",
        "is_a_miss_from_then_on", "RETRY", where=CONTRACT),
    Mutant("the tier's space leaves the layout of chunks out", "tier/identity.py",
        "identified = identity_pairs(pairs | layout)", "identified = identity_pairs(pairs)",
        "chunks_of_another_layout", "assert", where=CONTRACT),
    Mutant("a reset leaves the tier in the space of the old weights", "tier/manager.py",
        "            if self._generations.after_reset():\n                self._move()\n",
        "            self._generations.after_reset()\n",
        "means_other_weights", "assert", where=CONTRACT),
    Mutant("the tier shares weights that got a name at run time", "tier/manager.py",
        '        self.before_weights_call(f"version {version}")\n',
        "        self._generations.after_name(version)\n        self._move()\n",
        "get_a_name_at_run_time", "assert", where=CONTRACT),
    Mutant("the tier shares without vLLM's configuration", "tier/identity.py",
        "generation = PRIVATE + secrets.token_hex(16)\n        return", "generation = LOADED\n        return",
        "without_vllms_configuration", "assert", where=CONTRACT),
    Mutant("a state is saved as that of another boundary", "scheduler/states.py",
        "key = hashes[at - 1]", "key = hashes[at - 2]",
        "a_hit_ends_where", "state after 80 tokens", where=STATES),
    Mutant("a state is loaded at the wrong boundary", "scheduler/loads.py",
        "run.hashes.append(hashes[(i + 1) * scale - 1])",
        "run.hashes.append(hashes[(i + 1 - (group in self._geometry.states)) * scale - 1])",
        "states_after_generated_tokens", "state after", where=STATES),
    Mutant("a hit needs no state", "specs.py",
        "_STATE_WINDOW = 2 ", "_STATE_WINDOW = 1 ",
        "a_hit_ends_where", "assert", where=STATES),
    Mutant("the window of a group is ignored", "specs.py",
        "return int(one.sliding_window)", "return 1",
        "groups_of_other_kinds", "assert", where=SPECS),
    Mutant("a load without a block for its state counts", "scheduler/loads.py",
        " or table[last - 1].is_null:", ":",
        "without_a_block_for_its_state", "assert", where=PLANNED_STATES),
    Mutant("a state takes the last token of a received prompt twice", "scheduler/lookups.py",
        "request.num_tokens - tracked.has_states", "request.num_tokens",
        "last_token_is_computed", "assert", where=PLANNED_STATES),
    Mutant("states of a request with old weights are saved", "scheduler/states.py",
        " or tracked.stale or tracked.no_save", " or tracked.no_save",
        "saves_no_states", "assert", where=PLANNED_STATES),
    Mutant("parts of blocks are states", "state_rules.py",
        "if any(geometry.scale(group) > 1 for group in geometry.states):", "if False:",
        "parts_of_blocks", "DID NOT RAISE", where=PLANNED_STATES),
    Mutant("the layers of states tell their backend", "space.py",
        "(group.layer_names if type(spec).__name__ != STATE else ())", "group.layer_names",
        "workers_of_a_hybrid", "MAMBA2_ATTN", where=BACKENDS),
    Mutant("another registration waits as a refused one does", "link.py",
        "if self._wanted.wait(pause):", "if self._closed.wait(pause):",
        "another_registration", "the other registration did not come about", where=PARTS),
    Mutant("every process starts an agent", "../starter.py",
        "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass",
        "eight_processes", "too many values", where=STARTER),
    Mutant("the agent is the engine's child", "../starter.py",
        "        shell.kill()\n        shell.wait()\n", "        pass\n",
        "belongs_to_no_engine", "assert", where=STARTER),
    Mutant("no agent is started after the first one", "link.py",
        "            if not self._pool:\n", "            if True:\n",
        "killed_comes_back", "a session", where=STARTER),
    Mutant("an adapter is known by its name", "keys/adapters.py",
        "hasher, content.digest)", "hasher, str(lora.lora_name).encode())",
        "different_adapters_never_share", "assert", where=ADAPTERS),
    Mutant("an adapter is known by its files when they are digested", "worker/adapters.py",
        "        if unchanged:\n", "        if True:\n",
        "not_what_was_loaded and touched", "assert", where=ADAPTERS),
    Mutant("an adapter's files may change while vLLM reads them", "worker/adapters.py",
        "settled and self.states(request) == before", "settled",
        "another_during_the_load_only", "assert", where=ADAPTERS),
    Mutant("an adapter's files may have changed just before the load", "worker/adapters.py",
        "bool(before) and settled and", "bool(before) and",
        "during_or_just_before and touched", "assert", where=ADAPTERS),
    Mutant("a job is sent though its adapter has changed", "worker/side.py",
        "!= plan.space or not self._same_adapters(plan):", "!= plan.space:",
        "does_not_know_of", "assert", where=ADAPTERS),
    Mutant("a load counts though its adapter has changed", "worker/side.py",
        "if isinstance(plan, LoadJob) and not self._same_adapters(plan):", "if False:",
        "ends_after_its_adapter", "assert", where=ADAPTERS),
    Mutant("an adapter that was dropped comes back as it was", "worker/adapters.py",
        "number in kept or not self._changed(number) for",
        "True for",
        "dropped_and_replaced", "assert", where=ADAPTERS),
    Mutant("a request goes on after its adapter has changed", "scheduler/side.py",
        "        changed, known, stale = self._adapters.report(some)\n        if stale:\n",
        "        changed, known, stale = self._adapters.report(some)\n        if False:\n",
        "replaced_under_its_name", "a request of two contents was saved", where=ADAPTERS),
    Mutant("a name may have two adapters at once", "keys/adapters.py",
        "            self._mixed.add(name)\n", "            pass\n",
        "one_name_with_two_adapters", "assert", where=ADAPTERS),
    Mutant("a name may go to another adapter", "keys/adapters.py",
        "(before != number if before is not None else self._forgot)", "self._forgot",
        "a_name_that_goes", "assert", where=ADAPTERS),
    Mutant("one worker's digest of an adapter is enough", "keys/adapters.py",
        "[one.digest] * self._world:", "[one.digest]:",
        "workers_that_have_loaded_different", "assert", where=ADAPTERS),
    Mutant("the last block before a draft's next token is shared", "keys/following.py",
        "hashlib.sha256(hashes[i] + following)", "hashlib.sha256(hashes[i])",
        "part_after_a_block", "assert", where=DRAFTS),
    Mutant("with drafts, blocks found in the engine's own cache are saved", "scheduler/save_plan.py",
        "        begin = max(begin, tracked.found // size)\n", "",
        "found_in_the_engines_own_cache", "assert", where=FOLLOWING),
    Mutant("what finds no room at the end of its request is lost uncounted", "scheduler/saves.py",
        "            self.counts.missed += self.batch.lacking(tracked, tokens)\n", "            pass\n",
        "room_for", "assert \\(6, 0\\) == \\(6, 14\\)", where=TAILS),
    Mutant("what was revoked is never offered again", "scheduler/saves.py",
        "tracked.again.append((run.group, run.first + i, run.first + len(run.hashes)))", "pass",
        "what_was_revoked", "assert 0 == 4", where="tests/test_vllm_sides.py"),
    Mutant("what the engine had itself is never offered", "scheduler/save_plan.py",
        "tracked.again = [(group, 0, tracked.own // size) for", "tracked.again = [(group, 0, 0) for",
        "had_itself", r"assert \[\] == \[2\]", where="tests/test_vllm_sides.py"),
    Mutant("requests are looked at in any step", "scheduler/save_plan.py",
        "if self._steps % SEND_STEPS == 0:", "if self._steps:",
        "turn_in_a_run", "wake the agent in other steps", where="tests/test_vllm_schedule.py"),
    Mutant("a preemption revokes the saves of all", "scheduler/side.py",
        "saves.revoke(in_use=self._stopped or saves.blocks.withheld())", "saves.revoke()",
        "preemption_revokes", "assert 2 == 1", where=TAILS),
    Mutant("what the driver refuses counts as an error of the connector's", "worker/calls.py",
        "except (KVAgentError, OSError, RuntimeError) as error:", "except ZeroDivisionError as error:",
        "agent_cannot_be_given and CudaError", "the reason did not come about", where=UNCACHED),
    Mutant("a rank keeps to itself that it cannot be served", "worker/calls.py",
        '        self._worker.refuse(f"rank', '        str(f"rank',
        "rank_that_alone", "assert", where=UNCACHED),
    Mutant("workers stay with the agent in an uncached engine", "worker/calls.py",
        "if (plan := _plan(connector_metadata)).uncached:", "if not (plan := _plan(connector_metadata)):",
        "scheduler_that_alone", "assert", where=UNCACHED),
    Mutant("an uncached engine does not tell the agent", "scheduler/calls.py",
        "        self._scheduler = UncachedScheduler()\n        self._say_uncached()\n",
        "        self._scheduler = UncachedScheduler()\n",
        "computes_everything and False-False", "the reason in the agent's list", where=UNCACHED),
    Mutant("ranks on another node are served", "scheduler/calls.py",
        "                reason = elsewhere(report.workers, node())\n", "                pass\n",
        "found_in_the_first_step and tp2 and none", "assert", where=UNCACHED),
    Mutant("a start that is to end goes on where only the first step tells", "scheduler/calls.py",
        "        if self._options.on_unsupported == FAIL:\n            raise Unsupported(reason)\n", "",
        "end_the_engine_on_request", "DID NOT RAISE", where=UNCACHED),
    Mutant("over nodes, an engine of unequal parts joins the agent", "geometry.py",
        "if reason := placement.spread(parallel):", "if reason := placement.spread(parallel) and '':",
        "over_unequal_parts_joins_no_agent", "assert", where=UNCACHED),
    Mutant("over nodes, the greatest hit counts", "nodes/lookups.py",
        "least = min(one.tokens for one in answers)", "least = ticket.tokens",
        "least_of_what_the_nodes_have", "assert", where=NODES),
    Mutant("over nodes, a rank names another part's lease", "plan.py",
        'local["lease"] = target.lease', 'local["lease"] = job.lease',
        "job_for_no_agent", "assert", where=PARTS),
    Mutant("over nodes, a reset skips an agent that is away", "nodes/delegate.py",
        "if not self._agent.reset():", "if self._agent.session is not None and not self._agent.reset():",
        "missed_precedes and killed", "blocks of before the reset", where=NODES),
    Mutant("over nodes, a lease for nobody is kept", "nodes/joint.py",
        "if ticket.abandoned:", "if False:", "comes_after_its_request", "without leases", where=NODES),
    Mutant("over nodes, parts with other weights are one engine", "nodes/rules.py",
        '_OWN = (PAIR, GENERATION, UNSHARED, "resolved")', '_OWN = (PAIR, GENERATION, UNSHARED, "resolved", "weights")',
        "parts_of_other_engines", "assert", where=NODES),
    Mutant("over nodes, a load ends when one node's ranks have reported", "scheduler/loads.py",
        "if load.outcome.ranks < self._world:", "if load.outcome.ranks < 1:",
        "another_node_may_write_to and tp2", "assert", where=NODES),
    Mutant("over nodes, the last agent's lease is released at the next one", "nodes/joint.py",
        "if self._attachment is not None and boot in", "if self._attachment is not None or boot in",
        "same_numbers_to_other_leases", "assert", where=JOINT),
    Mutant("over nodes, an end beside a reset is not noticed", "nodes/joint.py",
        "self._up or self._foreign_reset or self._leases", "self._up or self._leases",
        "reset_does_not_hide_an_end", "assert", where=JOINT),
    Mutant("over nodes, a reset hides that leases have ended", "nodes/joint.py",
        "        self._behind.update(self.others)\n",
        "        self._behind.update(self.others)\n        self._facts = dict.fromkeys(self.others)\n",
        "does_not_hide_that_leases_have_ended", "assert 1 == 2", where=JOINT),
    Mutant("over nodes, a request that ends after a reset elsewhere keeps its leases", "scheduler/side.py",
        "            self._poll_agent(listen=False)  # while look-ups", "            pass  # while look-ups",
        "ends_after_a_reset_elsewhere", "assert None is not None", where=JOINT),
    Mutant("over nodes, the scheduler registers with another node's attention backends", "worker/calls.py",
        "identity=() if self._part.index else self._identity,", "identity=self._identity,",
        "attention_backends_of_nodes", "those of another node", where=NODES),
    Mutant("over nodes, an agent that stands still keeps its questions", "nodes/delegate.py",
        "waited < self._age_s and not self._stopped:", "waited < self._age_s:",
        "gives_up_what_it_asked", "lost=True", where=JOINT),
    Mutant("over nodes, LoRA adapters are served", "nodes/rules.py",
        'getattr(vllm_config, "lora_config", None) is not None', "False",
        "adapters_and_draft_models", "DID NOT RAISE", where=JOINT),
    Mutant("over nodes, the joint session outlives one of its sessions", "nodes/joint.py",
        "return super().session if self._up else None", "return super().session",
        "there_while_all_sessions_are", "assert", where=JOINT),
    Mutant("a mistake in the options is served uncached", "connector.py",
        "        except Unsupported as error:\n            if self._options",
        "        except ValueError as error:\n            if self._options",
        "mistake_in_the_options", "DID NOT RAISE", where=UNCACHED),
    Mutant("a layer does not wait for its part of a load", "worker/layer_loads.py",
        "self._stages.needed.get(layer, self._stages.count)", "0",
        "the_first_layer_computes and v2-async", "AssertionError: warm|assert .1, 1, 1, 96", where=LAYERWISE),
    Mutant("layers without a hook are not waited for", "worker/layer_loads.py",
        "return self._has(job, self._stages.first)", "return True",
        "layers_that_do_not_wait", "AssertionError: warm", where=LAYERWISE),
    Mutant("a step counts though a layer has not waited", "worker/layer_loads.py",
        "return not missing", "return True",
        "a_layer_that_was_expected_to_wait", "AssertionError|assert", where=LAYERWISE),
    Mutant("a load that was given up is waited for again", "worker/sync_loads.py",
        "            self._waited.remove(job)\n", "",
        "goes_between_two_layers and freeze and v2-async", "assert", where=LAYERWISE),
    Mutant("a word is used again before its load is over", "worker/layer_loads.py",
        ".append(self._free.pop())", ".append(self._free[-1])",
        "more_loads_than_words", "assert", where=LAYERWISE),
    Mutant("a cell is known by its position in the stage", "cells.py",
        "Cell(i * self.head_ranges + h,", "Cell((i - self.bounds.index(low)) * self.head_ranges + h,",
        "every_byte", "replicas of shard 0 differ", where=CELLS),
    Mutant("the layers of a cell lie in the order of a list", "worker/cell_memory.py",
        "        ordered = checked_layers(names, stage)\n", "        ordered = list(names)\n",
        "every_byte", "layer 0, head 0, block", where=CELLS),
    Mutant("a cell has the first heads of its rank", "cells.py",
        "h * self.heads_of_cell - first)", "0)",
        "every_byte", "head [1-7], block", where=CELLS),
    Mutant("a rank with replicated heads counts them as its own", "cells.py",
        "return rank % self.tp * self.heads // self.tp", "return rank % self.tp % self.heads",
        "cells_are_the_same", "assert", where=CELLS),
    Mutant("padded pages are split", "cells.py",
        '(("page_size_padded", None), ("num_head_slots", None),', '(("num_head_slots", None),',
        "what_cannot_be_split", "DID NOT RAISE", where=CELLS),
    Mutant("a draft model has the heads of the model", "cells.py",
        "    if own != heads:\n", "    if own % heads:\n",
        "one_head_on_each_rank", "DID NOT RAISE", where=CELLS),
    Mutant("a request that is not to be saved is", "scheduler/save_plan.py",
        "if tracked.stale or tracked.no_save or tracked.unkeyed:", "if tracked.stale or tracked.unkeyed:",
        "not_to_be_saved_is_loaded", "assert 4 == 0", where=SWITCHES),
    Mutant("a request that is not to be saved is at its end", "scheduler/side.py",
        " or tracked.stale or tracked.no_save\n", " or tracked.stale\n",
        "not_to_be_saved_is_loaded", "assert 4 == 0", where=SWITCHES),
    Mutant("old blocks of a request that is not saved are forgotten", "scheduler/side.py",
        "if not tracked.bypass and self._may_save:\n            self._check_stale",
        "if not (tracked.bypass or tracked.no_save) and self._may_save:\n            self._check_stale",
        "although_their_request_is_not_saved", "assert 3 == 0", where=SWITCHES),
    Mutant("the limit of a load counts what the engine has", "scheduler/lookups.py",
        "min(most, own + tracked.max_load_tokens)", "min(most, tracked.max_load_tokens)",
        "at_most_so_many_tokens and 2-3-2", "assert 0 ==", where=SWITCHES),
    Mutant("a request whose synchronous load failed computes on", "scheduler/sync_loads.py",
        "            elif self._preemption.preempt(name):\n",
        "            elif not self._preemption.publish(name, withheld.own):\n",
        "changes_between_promise_and_load and async", "AssertionError: (warm|twin)", where=SYNC),
    Mutant("other requests hit the blocks of a synchronous load", "scheduler/preemption.py",
        "        self._scheduler.kv_cache_manager.block_pool.evict_blocks({block.block_id for block in blocks})\n", "",
        "changes_between_promise_and_load and async", "AssertionError", where=SYNC),
    Mutant("the next step hashes the blocks of a synchronous load", "scheduler/preemption.py",
        "        manager.num_cached_block[request] = WITHHELD\n", "        manager.num_cached_block[request] = own\n",
        "nothing_is_hashed_before", "hashed before their load", where=SYNC),
    Mutant("the blocks of a synchronous load are never hashed", "scheduler/preemption.py",
        "            self._manager.num_cached_block[request] = own\n", "            pass\n",
        "step_that_computes and v2", "not in the engine's own cache", where=SYNC),
    Mutant("blocks that are hashed at the end of a request are not of old weights", "scheduler/side.py",
        "            self._stale_requests.mark_blocks()\n            self._stale_requests.remove(tracked)\n"
        "        self._transfers.deliver(tracked)\n",
        "            self._stale_requests.remove(tracked)\n        self._transfers.deliver(tracked)\n",
        "before_the_end_of_a_request_of_one_token and v2", "blocks of old weights count as new ones", where=SYNC),
    Mutant("a step that waits saves what it computes", "scheduler/side.py",
        "                self._sync_loads.begin(job, tracked, external)\n",
        "                self._sync_loads.begin(job, tracked, external)\n                self._admit(tracked)\n",
        "nothing_is_saved_before", "was saved", where=SYNC),
    Mutant("the late output of a preempted request is delivered", "scheduler/preemption.py",
        "            one.drop_stale_output = True\n", "            pass\n",
        "preemption_before_the_outcome", "AssertionError: warm", where=SYNC),
    Mutant("what is not ready is loaded synchronously", "scheduler/sync_loads.py",
        "if not (tokens and ready and self._may(tracked)):", "if not (tokens and self._may(tracked)):",
        "not_be_ready_is_asynchronous", "assert", where=SYNC),
    Mutant("a synchronous load names the step that waits for it", "worker/side.py",
        "self._sync_loads.run(sync, self._step - 1, stopped=plan.stopped)",
        "self._sync_loads.run(sync, self._step, stopped=plan.stopped)",
        "step_that_computes and v2", "assert", where=SYNC),
    Mutant("the end of a synchronous load is reported to vLLM", "worker/side.py",
        "if not plan.sync:\n            self.pending_results.received",
        "if plan:\n            self.pending_results.received",
        "step_that_computes and v2", "AssertionError", where=SYNC),
    Mutant("bad blocks of a synchronous load are reported a step later", "worker/side.py",
        " or self.pending_results.sent or self.pending_results.bad_blocks):", " or self.pending_results.sent):",
        "changes_between_promise_and_load", "AssertionError", where=SYNC),
    Mutant("a synchronous load that is given up counts as loaded", "worker/side.py",
        'self.pending_results.bad_blocks.update(bad_blocks(inflight.plan, b"\\1" * inflight.plan.blocks))', "pass",
        "frozen_agent_costs_one", "AssertionError: warm", where=SYNC),
    Mutant("every step waits for a silent agent", "worker/sync_loads.py",
        "            self._silent = True\n", "",
        "silent_agent_is_not_waited", "assert", where=SYNC),
    Mutant("a step waits for any number of bytes", "scheduler/sync_loads.py",
        "        self._left -= size\n", "", "bounded_number_of_bytes", "assert", where=SYNC),
    Mutant("an option that differs is accepted", "options.py",
        'raise OptionError("; ".join(f"{name}: {why}" for name, why in refused.items()))', "pass",
        "others_end_the_start", "DID NOT RAISE", where=FOREIGN),
    Mutant("an option of another connector overrides ours", "options.py",
        "elif given[name] != given[present := origins.setdefault(foreign.option, name)]:",
        "elif given[present := origins.setdefault(foreign.option, name)] is None:",
        "others_end_the_start", "DID NOT RAISE", where=FOREIGN),
    Mutant("layerwise alone loads asynchronously", "options.py",
        '{"load_mode": "auto", ', "{",
        "plain_synonyms", "OptionError", where=FOREIGN),
    Mutant("what the disk has counts as the memory's", "scheduler/lookups.py",
        "disk = min(promised.disk, tokens - other)", "disk = 0",
        "only_the_disk_has", "assert", where="tests/vllm/test_hit_sources.py"),
    Mutant("blocks are kept before their saves have ended", "scheduler/keeps.py",
        "if waiting.through < 0 or not saves.settled(waiting.through):", "if False:",
        "last_saves_are_waited_for", "four kept blocks|assert 0 == 4", where=SWITCHES),
    Mutant("blocks of old weights are kept", "scheduler/keeps.py",
        "if tracked.stale or tracked.bypass or ", "if tracked.bypass or ",
        "old_blocks_are_not_kept", "assert 4 == 0", where=SWITCHES),
    Mutant("what others stored is dropped", "scheduler/keeps.py",
        "for key, status in stored if status == BlockStatus.OK]", "for key, status in stored]",
        "stored_first_is_dropped", "three dropped blocks", where=SWITCHES),
    Mutant("a block that was reused is saved as what it held before", "scheduler/lazy.py",
        "self.unsaved.pop(block.block_id, None) is not None", "self.unsaved.get(block.block_id) is not None",
        "was_reused", "is stored with the content", where=LAZY),
    Mutant("blocks of old weights are saved when their eviction comes near", "scheduler/lazy.py",
        " and not self._blocks.is_stale(block):\n            return unsaved", ":\n            return unsaved",
        "old_weights", "is stored with the content", where=LAZY),
    Mutant("a block that lost its hash is saved when its eviction comes near", "scheduler/lazy.py",
        "if unsaved.block_hash == block.block_hash and not", "if not",
        "lost_its_hash", "assert", where=LAZY),
    Mutant("what a revoked save held is noted only once it is reported", "scheduler/saves.py",
        "            again = not save.pinned", "            again = False",
        "what_was_revoked", "is stored with the content", where=LAZY),
    Mutant("what was saved overtakes older blocks", "scheduler/lazy.py",
        "queue.prepend_n(older + free)", "queue.prepend_n(free + older)",
        "order_of_eviction", "assert", where=LAZY),
    Mutant("what was saved is the last to be evicted", "scheduler/lazy.py",
        "queue.prepend_n(older + free)", "queue.prepend_n(older), queue.append_n(free)",
        "order_of_eviction", "assert", where=LAZY),
    Mutant("blocks that a request used do not bring others nearer", "scheduler/lazy.py",
        "        self._taken += sum(tracked.own // size for _, size, _, _ in self._groups)\n", "",
        "bring_others_nearer", "assert", where=LAZY),
    Mutant("a chain is sent from its end", "scheduler/lazy.py",
        "    for run in runs:\n        run.reverse()\n", "",
        "begins_at_the_root", "assert", where=LAZY),
    Mutant("blocks for a decode engine wait for their eviction", "scheduler/lazy.py",
        "self.pressing or tracked.offer is not None or", "self.pressing or",
        "offered_requests", "assert", where=LAZY),
    Mutant("requests keep their blocks unsaved though few are free", "scheduler/lazy.py",
        "self._in_use() if self.pressing else []\n", "[]\n",
        "few_blocks_are_free", "assert", where=LAZY),
    Mutant("a load that failed counts as good", "worker/side.py",
        "if cancelled or (statuses and not any(statuses)):", "if cancelled or statuses:",
        "fails_in_one_rank", "a failed load counts as good"),
    Mutant("a lazy save has the key of the block before it", "scheduler/lazy.py",
        "Unsaved(block.block_hash, group, key, parent)", "Unsaved(block.block_hash, group, parent or key, b'')",
        "is_saved_when_its_eviction_comes_near", "assert", where=LAZY),
    Mutant("what clients send is taken for a mapping", "switches.py",
        "if params is None or isinstance(params, dict):", "if True:",
        "whatever_clients_send", "AttributeError", where=SWITCHED),
    Mutant("keys are longer than hashes", "keys/media.py",
        ".digest()[: len(hashes[i])]", ".digest()",
        "xxhash", "assert", where=ALGORITHMS),
    Mutant("an error of the connector's leaves a call of vLLM's", "boundary/errors.py",
        "            return failed(self, name, error, *args, **kwargs)", "            raise",
        "one_error_is_forgiven", "RuntimeError: planted", where="tests/vllm/test_boundary.py"),
    Mutant("a request loads against its switch", "switches.py",
        "                    tracked.no_load = True\n", "",
        "each_switch_holds", "assert", where=SWITCHED),
    Mutant("loads that failed with their step are sent again", "worker/calls.py",
        "dataclasses.replace(plan, loads=[])", "dataclasses.replace(plan)",
        "failed_with_their_step", "AssertionError", where="tests/vllm/test_boundary.py"),
    Mutant("random runs: blocks that others have fail with a load", "boundary/scheduler.py",
        "list(tables[0][own:])", "list(tables[0])",
        "raise_errors", "At index", where=MODES),
    Mutant("random runs: what a step computed from a load that raised an error counts", "boundary/scheduler.py",
        "            side.will_fail(job, tracked, num_external_tokens)\n", "            pass\n",
        "raise_errors", "At index", where=MODES),
    Mutant("a request loads more than its switch allows", "scheduler/lookups.py",
        "min(most, own + tracked.max_load_tokens)", "most",
        "at_most_so_many", "assert", where=SWITCHED),
    Mutant("save boundary without subtracting placeholders", "scheduler/save_plan.py",
        "+ scheduled - request.num_output_placeholders", "+ scheduled",
        "what_may_be_taken_back", "placeholders count as tokens"),
    Mutant("save boundary beyond what is computed", "scheduler/save_plan.py",
        "+ scheduled - request.num_output_placeholders\n    certain: int = request.num_tokens - following\n",
        "+ scheduled + 64\n    certain: int = 1 << 62\n",
        "no_byte_is_wrong and LHBNC", "rank [01] .* wrong"),
    Mutant("the pins of a save are not taken", "scheduler/requests.py",
        "        self._pool.touch(blocks)\n",
        "        if load:\n            self._pool.touch(blocks)\n",
        "abort_while_saving", "a frozen agent may still read"),
    Mutant("memory is released after a deadline", "worker/calls.py",
        "        if worker is None or worker.leave():\n",
        "        if worker is None or worker.leave() or True:\n",
        "memory_is_kept", "memory was given up without a fence"),
    Mutant("memory is released at the end, without a fence", "worker/calls.py",
        "        if worker is not None and not worker.close():\n",
        "        if worker is not None and not worker.close() and False:\n",
        "memory_is_kept", "memory was given up without a fence"),
    Mutant("a load is reported before it arrived", "worker/side.py",
        "        self.jobs[plan.job] = inflight\n",
        ("        self.jobs[plan.job] = inflight\n        if isinstance(plan, LoadJob):\n"
         "            inflight.reported = True\n            self.pending_results.received.add(plan.request)\n"),
        "not_reported_before", "reported before it arrived"),
    Mutant("what precedes a failed block counts as good with windows too", "geometry.py",
        "return len(groups) == 1 and not specs.window(groups[0].kv_cache_spec)", "return len(groups) == 1",
        "precedes_a_failed_block", "computed on without its window"),
    Mutant("a failed load is reported as good", "worker/side.py",
        "        if cancelled or (statuses and not any(statuses)):", "        if statuses or not cancelled:",
        "fails_in_one_rank", "a failed load counts as good"),
    Mutant("a resumed request counts as one never seen (V2)", "scheduler/side.py",
        "        if tracked is None:\n            keyed",
        "        if tracked is None or (tracked.admitted and request.num_preemptions):\n            keyed",
        "not_promised_what_failed and True", "a resumed request counts as one never seen"),
    Mutant("the block table of a resumed request is not replaced (V1)", "scheduler/requests.py",
        "        blocks: Sequence[Any] = self._manager.get_blocks(request).blocks[group][begin:end]\n",
        "        now = self._manager.get_blocks(request).blocks[group]\n"
        "        blocks: list[Any] = vars(self).setdefault(request + str(group), [])\n"
        "        blocks += now[len(blocks) :]\n        blocks = blocks[begin:end]\n",
        "new_blocks_hold and False", "a table that was not replaced"),
    Mutant("an agent that is late is given up", "scheduler/waits.py",
        "        self._grace_s = min(options.lookup_grace_ms / 1e3, self._age_s)\n",
        "        self._grace_s = self._age_s = 0.02\n",
        "half_of_the_time", "an agent that is late is not waited for"),
    Mutant("each request waits for a frozen agent", "scheduler/waits.py",
        " / (1 << min(self._in_vain, MAX_HALVINGS))", "",
        "bounded_time_in_total", "assert", where=WAITS),
    Mutant("a request waits as long again in each look-up", "scheduler/waits.py",
        "            tracked.waited_s += max(now - since, 0.0)", "            tracked.waited_s = max(now - since, 0.0)",
        "in_all_its_look_ups", "assert", where=WAITS),
    Mutant("an agent that answers no ping is waited for", "scheduler/side.py",
        "waiting and (self.waiting() or agent.awaited()) and", "waiting and self.waiting() and",
        "frozen_one_once", "answers no ping is waited for", where=WAITS),
    Mutant("the end of the session is not seen while a request waits", "scheduler/side.py",
        "waiting = self.waiting() or agent.awaited()", "waiting = self.waiting()",
        "killed_agent_is_not_waited_for", "gone is waited for", where=WAITS),
    Mutant("a question too many is a miss", "scheduler/lookups.py",
        "        with contextlib.suppress(Busy):\n            tracked.ticket = lookups",
        "        if True:\n            tracked.ticket = lookups",
        "wait_their_turn", "Busy", where=WAITS),
    Mutant("the lease of a late answer is kept", "scheduler/lookups.py",
        "            self._release(leases)\n", "            pass\n",
        "frozen_one_once", "an agent without leases", where=WAITS),
    Mutant("a counter is not exported", "counters.py",
        '    "lookups_pending": "Look-ups whose lower tiers took longer than the wait for them.",\n', "",
        "counters_reach", "documented|lookups_pending"),
    Mutant("lines go to a logger that vLLM does not configure", "link.py",
        'logging.getLogger("vllm.kvagent")', 'logging.getLogger("kvagent.vllm")',
        "log_lines_appear_once", "assert"),
    Mutant("a load's destination is unpinned at the deadline", "scheduler/loads.py",
        "            load.tracked.no_load = True\n",
        ("            load.tracked.no_load = True\n            self._blocks.unpin(load.blocks, load=True)\n"
         "            load.blocks = []\n"),
        "given_up", "a frozen agent may still write"),
    Mutant("a load does not wait for the step in flight", "worker/side.py",
        "return session.load(sections, epoch=plan.epoch, step=step, event=event, lease=plan.lease)",
        "return session.load(sections, epoch=plan.epoch, step=0, lease=plan.lease)",
        "waits_for_the_step", "DID NOT RAISE"),
    Mutant("a save is not revoked at reset_prefix_cache", "scheduler/side.py",
        "            self._revokes += self.saves.revoke_at_once()\n", "            return\n",
        "pins_go", "reset_prefix_cache"),
    Mutant("a revoked save's word is not set", "scheduler/saves.py",
        "            self.revoke_now(save.revoke)\n", "            pass\n",
        "pins_go", "blocks that are reused"),
    Mutant("a stopped agent is awaited", "scheduler/agent_session.py",
        "            return now - self._since > SILENT_S\n", "            return False\n",
        "agent_stands_still", "pins that are given back did not come about"),
    Mutant("a new agent's epoch counts as the old one's", "scheduler/agent_session.py",
        "last = self._epoch if self._boot == attachment.session.boot else FIRST_EPOCH", "last = self._epoch or 1",
        "agent_was_restarted", "blocks of older weights are stored"),
    Mutant("a reset with new weights keeps the identity", "weight_changes.py",
        "        if self._fixed:\n            return False\n        version = self._file.take()",
        "        if True:\n            return False\n        version = self._file.take()",
        "updated_engine_and_one_of_the_old and kind0", "rank [01] .* wrong"),
    Mutant("a call that changes weights is not observed", "weight_changes.py",
        "            connector.before_weights_call(name)\n", "            pass\n",
        "calls_through_the_engine_core", "startswith"),
    Mutant("loaded blocks count as computed by the new weights", "scheduler/side.py",
        " or tracked.load != 0 or tracked.ever_loaded\n", " or tracked.load != 0 or tracked.loaded[1] > 0\n",
        "brought_stay_of_their_weights", "blocks of other weights", where="tests/test_vllm_new_weights.py"),
    Mutant("a reset of vLLM's own cache is ignored though weights change unobserved", "scheduler/side.py",
        "        self._was_reset = self.generations.counts_resets\n", "        pass\n",
        "follow_weights_that_changed_unobserved", "blocks of other weights|finds",
        where="tests/test_vllm_new_weights.py"),
    Mutant("a reset in the calling program's process is a plain one", "weight_changes.py",
        "        return self._unobserved or (self._in_process and not self.now.startswith(NAMED))\n",
        "        return self._unobserved\n",
        "follow_weights_that_changed_unobserved and in_process", "blocks of other weights|finds",
        where="tests/test_vllm_new_weights.py"),
    Mutant("a named version is taken for each reset that follows", "weight_changes.py",
        "        self._seen = stamp\n        try:", "        try:",
        "a_version_speaks_for_one_reset", "of the reset before"),
    Mutant("the workers keep the old identity", "worker/side.py",
        "            self._use_generation(generation)\n", "            pass\n",
        "updated_engine_and_one_of_the_old and kind0", "registered"),
    Mutant("a session that was registered with the old identity is used", "link.py",
        "            if serial != self._serial:", "            if False:",
        "registration_in_flight_is_not_used", "the old identity"),
    Mutant("a job goes out in another space than it was planned for", "worker/side.py",
        "if attachment.registered.space != plan.space or not", "if not",
        "planned_before_the_change", "goes out under the new identity"),
    Mutant("a load is reported twice", "worker/side.py",
        "        if not inflight.reported:\n            self._report_load",
        "        if True:\n            self._report_load",
        "given_up", "AssertionError"),
    Mutant("of weights only the ends of a file count", "../weights/samples.py",
        "        return _tensors(file)\n",
        "        return [Span(0, min(1 << 20, file.bytes)), Span(max(file.bytes - (1 << 20), 0), 1 << 20)]\n",
        "another_checkpoint", "differ in the middle have one digest", where=WEIGHTS),
    Mutant("of a tensor only the ends count", "../weights/samples.py",
        "    inner = count - 2\n", "    inner = 0\n",
        "middle_of_a_tensor", "a part of a tensor is not in the digest", where=WEIGHTS),
    Mutant("a digest is kept without the change time", "../weights/digest_cache.py",
        "found.st_mtime_ns, found.st_ctime_ns)", "found.st_mtime_ns, 0)",
        "another_checkpoint and overwrite", "differ in the middle have one digest", where=WEIGHTS),
    Mutant("the digest of a file that has just changed is kept", "../weights/digest_cache.py",
        "state.changed + SETTLED_NS < begun_ns", "state.changed <= begun_ns",
        "has_just_changed", "assert 1 == 2", where=WEIGHTS),
    Mutant("a file may change between its load and its digest", "../weights/files.py",
        "state.changed >= since_ns and", "state.changed < 0 and",
        "since_the_process_began", "is None", where=WEIGHTS),
    Mutant("the name of a blob does not count", "../weights/files.py",
        "{blob if _BLOB.match(blob) else ''}", "",
        "names_of_its_content", "other content by its name", where=WEIGHTS),
    Mutant("any loader takes the digest of the folder", "weights.py",
        "    DUMMY: (),\n", "    DUMMY: (), 'tensorizer': (), 'sharded_state': (),\n",
        "take_no_digest", "assert '.*' is None", where=WEIGHTS),
    Mutant("the weights of a draft model do not count", "space.py",
        "    if digest is None or draft is None or", "    if True or",
        "draft_model_count", "AssertionError", where=WEIGHTS),
    Mutant("weak hashes while tenants share", "space.py",
        "    if tenant and algorithm", "    if not tenant and algorithm",
        "can_be_forged", "prefix_caching_hash_algo|DID NOT RAISE", where="tests/test_vllm_parts.py"),
    Mutant("items are keyed by client names", "keys/media.py",
        "        return Keyed(request, items, self._hash_tokens)", "        return request",
        "clients_name_alike", "taken for another of that name"),
    Mutant("a name of two contents stays in use", "keys/media.py",
        "if not content or (digest and content != digest):", "if not content:",
        "two_contents_in", "media_bypassed"),
    Mutant("requests in flight with a name of two contents are still saved", "scheduler/side.py",
        "                tracked.bypass, tracked.admitted = True, False\n", "",
        "two_contents_in", "may be of either content"),
    Mutant("the scheduler assumes the attention backend", "scheduler/calls.py",
        "            theirs = as_worker(self._identity, one.identity or self._identity)\n", "            continue\n",
        "supposed_another_backend", "a scheduler of its workers' space"),
    Mutant("a value of an unknown type counts as its type", "resolved.py",
        "        self.unknown.append(f\"{path} {why}\")\n", "",
        "unknown_type", "KeyError", where=IDENTITY),
    Mutant("an attribute that is no field does not count", "resolved.py",
        "for name in sorted(names | set(getattr(value, \"__dict__\", ())))", "for name in sorted(names)",
        "unknown_field", "one of them does not count", where=IDENTITY),
    Mutant("an option's file counts by its name", "resolved.py",
        "return files.digest(files.files(place, every=True), [], None if new else self._since)", "return str(place)",
        "an_option_names", "AssertionError", where=IDENTITY),
    Mutant("a name of the weights is taken for all that counts", "weight_changes.py",
        "pairs | {PAIR: own or generation}", "pairs | {PAIR: generation}",
        "unknown_type", "AssertionError", where=IDENTITY),
    Mutant("of a model in an object store only the weights count", "weights.py",
        "    return _joined([*here, objects.digest(url, since)])", "    return objects.digest(url, since)",
        "survives_a_restart", "counts as it does with a folder", where=WEIGHTS),
    Mutant("a transfer is complete before its saves are reported", "scheduler/transfers.py",
        "if offer.through < 0 or not saves.settled(offer.through):", "if offer.through < 0:",
        "complete_only_when", "complete before its saves", where=TRANSFERS),
    Mutant("the saves of requests before a transfer are not waited for", "scheduler/transfers.py",
        "            offer.through = saves.last_job\n", "            offer.through = 0\n",
        "another_request_saves", "complete before its saves", where=TRANSFERS),
    Mutant("the pins of an offered request are kept", "scheduler/saves.py",
        "        if save.pinned:\n            self._unpin(save.blocks, deliver=save.deliver, near",
        "        if save.pinned and not save.deliver:\n            self._unpin(save.blocks, deliver=False, near",
        "aborted_prefill_request_completes", "pins of an aborted request are kept", where=TRANSFERS),
    Mutant("a prompt is received again", "scheduler/side.py",
        'request.kv_transfer_params["do_remote_prefill"] = False', 'request.kv_transfer_params["received"] = True',
        "waits_for_the_blocks", "received again after a preemption", where=TRANSFERS),
    Mutant("what is received waits no longer than a cache's look-up", "scheduler/waits.py",
        "return self._remote_s if tracked.wanted.early else min(self._remote_s, COMPUTED_S)", "return 0.0",
        "waits_for_the_blocks", "an open transfer is not waited for", where=TRANSFERS),
    Mutant("saves for a decode engine are revoked when blocks are scarce", "scheduler/saves.py",
        "if save.pinned and (offers or not save.deliver) and (in_use or _holds(save.blocks)):",
        "if save.pinned and (in_use or _holds(save.blocks)):",
        "stay_pinned", "are revoked like others", where=TRANSFERS),
    Mutant("a request that is kept is never freed", "scheduler/side.py",
        "                plan.released = self._transfers.released()\n", "",
        "kept_where_they", "the end of all saves|== \\['cmpl-a-0'\\]", where=TRANSFERS),
    Mutant("a request whose load is in flight is kept", "scheduler/transfers.py",
        "        if saves is not None and _lacks(tracked) and", "        if saves is None or",
        "loads_when_it_ends", "'NoneType' object has no attribute 'now'|True is False", where=TRANSFERS),
    Mutant("blocks that another engine saves count as stored", "scheduler/saves.py",
        "if save.pinned and save.deliver and not save.stale and BlockStatus.IN_PROGRESS in statuses:", "if False:",
        "another_engine_saves", "offered again|complete before another", where=TRANSFERS),
    Mutant("blocks of old weights are offered again", "scheduler/saves.py",
        "            save.stale = True\n", "            pass\n",
        "old_weights_are_not_offered", "offered again", where=TRANSFERS),
    Mutant("what is kept is not freed by a reset", "scheduler/side.py",
        "            self._revokes += self.saves.revoke_at_once()\n            self._transfers.save_no_more()\n",
        "            self._revokes += self.saves.revoke_at_once()\n",
        "reset_frees_what_is_kept", "kept after a reset", where=TRANSFERS),
    Mutant("what is kept is not freed before the agent reports", "scheduler/transfers.py",
        "            self._release(tracked)  # even if the agent reports nothing\n", "",
        "bounded_time_for_an_agent", "kept while the agent stands still", where=TRANSFERS),
    Mutant("a decode engine that waits spins", "scheduler/side.py",
        "idle=not self._tracked or not scheduled", "idle=not self._tracked",
        "does_not_spin", "takes a processor", where=TRANSFERS),
    Mutant("the tier copies on a load that it has given up", "tier/loads.py",
        "        if not part.job.reported:\n            for key, row", "        if True:\n            for key, row",
        "load_that_was_given_up", "a row was written after it had been given back", where=PROOF),
    Mutant("the tier takes what did not verify for loaded", "tier/loads.py",
        "                if status == BlockStatus.OK:\n", "                if status != BlockStatus.OK or True:\n",
        "wrong_in_the_pool", "assert 96 < 96", where=PROOF),
    Mutant("the tier loads before a reset is flushed", "tier/manager.py",
        "self._held_steps = 0 if FENCED else self._flushing_steps()", "self._held_steps = 0",
        "copies_from_before_a_reset", "AssertionError|assert", where=CONTRACT),
    Mutant("tokens are said before the agent keeps them", "events/publication.py",
        "            if self._open:\n", "            if True:\n",
        "said_once_the_agent_keeps_them", "assert 1 == 0", where=EVENTS),
    Mutant("an answer from before all blocks were cleared is published", "events/publication.py",
        "                if answer.req == self._asked:\n", "                if True:\n",
        "everything_is_asked_anew", "what was asked before", where=EVENTS),
    Mutant("what an agent held stays told after its end", "events/publication.py",
        "        self._leaving = len(self._published) > 0\n        self.tokens", "        self.tokens",
        "from_the_leaf_on", "assert", where=EVENTS),
    Mutant("a block is published without its parent", "events/publication.py",
        "(parent is not None and parent not in stored) or ", "",
        "no_router_could_use", "AssertionError|assert", where=EVENTS),
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
