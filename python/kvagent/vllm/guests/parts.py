"""The parts of an engine over several nodes, and what they tell each other.

To its agent, the ranks of one node are an engine of their own: a *part*, with an identity of its
own. What the scheduler plans is read there with the part's session and leases (nodes).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from kvagent.registration import identity_pairs
from kvagent.vllm.geometry import WITHOUT_DRAFTS, Part, Ranks, Unsupported, shard
from kvagent.vllm.options import LAZY
from kvagent.vllm.plan import LoadJob, SaveJob
from kvagent.vllm.weight_changes import PAIR as GENERATION
from kvagent.vllm.weight_changes import UNSHARED

if TYPE_CHECKING:
    from kvagent.vllm.geometry import Geometry, Identity
    from kvagent.vllm.options import Options
    from kvagent.vllm.plan import Report, StepPlan

_Job = TypeVar("_Job", SaveJob, LoadJob)
NODES = "nodes"
"""The name under which the scheduler and the delegates tell each other."""


@dataclass(frozen=True, slots=True)
class Question:
    """A look-up that reserves blocks, answered once while it is open."""

    number: int
    tokens: int
    own: int
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Orders:
    """What the delegates are to do: the resets ordered so far; to give up the questions that are
    not ``open``, with their leases; to answer new ``questions``.
    """

    resets: int
    open: tuple[int, ...] = ()
    questions: tuple[Question, ...] = ()


@dataclass(frozen=True, slots=True)
class Answered:
    """The answer to a question: the first ``tokens`` are stored, pinned by ``lease`` unless it is
    0. None: there was no answer in time, or no agent.
    """

    number: int
    tokens: int | None
    lease: int = 0


@dataclass(frozen=True, slots=True)
class Facts:
    """A delegate's session. ``job_blocks``: the most that its agent accepts in one job."""

    boot: bytes
    number: int
    epoch: int
    space: bytes
    job_blocks: int


@dataclass(frozen=True, slots=True)
class News:
    """The state of a delegate where it has changed, and its answers.

    ``resets``: those that it has done, or will do before it has a session. ``stopped``: the agent
    does not respond though its sockets exist. ``late``: leases may still come in late answers.
    ``reset``: another engine has reset the space. ``identity``: without its weights generation.
    """

    part: int
    resets: int
    session: Facts | None
    stopped: bool = False
    late: bool = False
    reset: bool = False
    identity: tuple[tuple[str, str], ...] = ()
    answers: tuple[Answered, ...] = ()


def _at(part: int, job: _Job) -> _Job:
    """Return a job as the ranks of another part than the scheduler's read it: it names by part the
    session, or None if it was planned without one, and the lease.
    """
    session, lease = job.elsewhere[part - 1] if job.elsewhere else (None, 0)
    local: dict[str, Any] = {"boot": b"", "epoch": 0, "space": b""}
    if session is not None:
        local = {"boot": session.boot, "epoch": session.epoch, "space": session.space}
    if isinstance(job, LoadJob):
        local["lease"] = lease
    return replace(job, **local)


PAIR = "part"
_OWN = (PAIR, GENERATION, UNSHARED, "resolved")
"""Pairs that may differ between the parts of an engine: the generation is ordered by the scheduler,
and blocks of all attention backends that may have computed other parts are equivalent.
"""


class NodePart(Part):
    """A part of such an engine: to its agent, an engine of its own."""

    __slots__ = ()

    @property
    def text(self) -> str:
        """Return the ranks, for the identity."""
        return f"ranks {self.ranks[0]} to {self.ranks[-1]} of {self.world}"

    def check(self, vllm_config: Any, geometry: Geometry, options: Options, kv_role: str) -> Options:
        """Return the options that hold for the engine. Raise Unsupported."""
        rank, method = int(vllm_config.parallel_config.rank), ""
        if (speculative := getattr(vllm_config, "speculative_config", None)) is not None:
            method = str(getattr(speculative, "method", None) or "of a draft model")
        refused = {
            "windows or states: the least of the nodes' hits is not a hit at all of them":
                geometry.states or any(group.window for group in geometry.groups),
            "share_tp or share_pp: engines of other shapes have their ranks on other nodes":
                options.share_tp or options.share_pp,
            f"kv_role {kv_role}: a transfer has one agent": kv_role != "kv_both",
            "load_mode sync or layerwise: a step would wait for all agents":
                options.load_mode == "sync" or options.layerwise,
            "offload lazy": options.offload == LAZY,
            "LoRA adapters: that all nodes have the same content of each is not proved":
                getattr(vllm_config, "lora_config", None) is not None,
            f"speculative_config.method {method}: what all nodes have of a draft model's blocks is not proved":
                method and method not in WITHOUT_DRAFTS,
            f"rank {rank} on node {self.index}, which has {self.text}": rank % self.world not in self.ranks,
        }  # fmt: skip
        for why in [one for one, is_so in refused.items() if is_so]:
            raise Unsupported(
                f"an engine over {self.count} nodes with {why} (docs/decisions/2026-11-23-several-nodes.md)"
            )
        return replace(options, transfers=False, load_mode="async")

    def of_ranks(self, whole: Ranks, replicas: int) -> Ranks:  # noqa: ARG002
        """Return how the KV cache is distributed over the part's ranks."""
        return Ranks(len(self.ranks), len(self._shards(replicas)))

    def of_identity(self, pairs: Identity) -> Identity:
        """Return the identity of the part."""
        return identity_pairs(dict(pairs) | {PAIR: self.text})

    def of_plan(self, plan: StepPlan) -> StepPlan:
        """Return a plan as the part's ranks read it."""
        if not self.index or not (plan.saves or plan.loads):
            return plan
        saves, loads = [_at(self.index, save) for save in plan.saves], [_at(self.index, load) for load in plan.loads]
        return replace(plan, saves=saves, loads=loads)

    def shard(self, rank: int, replicas: int) -> int:
        """Return a worker's shard among those of its part, in which they are numbered anew."""
        return self._shards(replicas).index(shard(rank, self.tp, replicas))

    def difference(self, own: Identity, report: Report) -> str:
        """Return why a part cannot belong to the scheduler's engine: all that determines the bytes
        of any part has to be equal in all of them.
        """
        for one in [one for one in report.news.get(NODES, ()) if one.identity]:
            here, there = dict(own), dict(one.identity)
            names = [key for key in sorted(here | there) if key not in _OWN and here.get(key) != there.get(key)]
            if names:
                return f"node {one.part} of the engine has another {', '.join(names)} than that of its scheduler"
        return ""

    def _shards(self, replicas: int) -> list[int]:
        return sorted({shard(rank, self.tp, replicas) for rank in self.ranks})
