"""What vLLM carries between the roles of a connector: plans and reports."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvagent.vllm.plan import Report, StepPlan


@dataclass
class Metadata(KVConnectorMetadata):
    """A step's plan on its way to the workers."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers' reports on their way to the scheduler."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Both reports as one."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.report.join(other.report))
