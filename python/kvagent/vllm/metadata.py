"""Subclasses of vLLM's classes that carry plans, reports and counters between the roles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvagent.vllm.counters import GAUGES, HELP
from kvagent.vllm.plan import Report, StepPlan


@dataclass
class Metadata(KVConnectorMetadata):
    """A step's plan for the workers."""

    plan: StepPlan = field(default_factory=StepPlan)


@dataclass
class WorkerMetadata(KVConnectorWorkerMetadata):
    """Workers' reports for the scheduler."""

    report: Report

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Return both reports as one."""
        assert isinstance(other, WorkerMetadata)
        return WorkerMetadata(self.report.join(other.report))


class Stats(KVConnectorStats):
    """The counters since the last report."""

    def reset(self) -> None:
        """Clear the counters."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the counters of another."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counters that are not zero, for the log."""
        return {name: value for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not any(self.data.values())


class PromMetrics(KVConnectorPromMetrics):
    """One counter ``vllm:kvagent_..._total`` per name of HELP, and one gauge ``vllm:kvagent_...``
    per name of GAUGES, present at zero from the start.
    """

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, dict[int, Any]] = {}
        for kind, texts in ((self._counter_cls, HELP), (self._gauge_cls, GAUGES)):
            for name, text in texts.items():
                one = kind(name=f"vllm:kvagent_{name}", documentation=text, labelnames=labelnames)
                self._metrics[name] = {engine: one.labels(*values) for engine, values in per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the counters of a report; a gauge in it is 1, however many processes report it."""
        for name, value in transfer_stats_data.items():
            if name in GAUGES and value > 0:
                self._metrics[name][engine_idx].set(1)
            elif name in HELP and value > 0:
                self._metrics[name][engine_idx].inc(value)
