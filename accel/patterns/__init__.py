"""Patterns that services are built from: many small requests served as few large batches."""

from __future__ import annotations

from accel.patterns.batcher import DynamicBatcher
from accel.patterns.recovering import Recovering
from accel.patterns.requests import BatcherStatistics, Receipt, ReplicaStatistics, TenantStatistics
from accel.patterns.rollout import Rollout
from accel.patterns.serving import ModelService, serve

__all__ = [
    "BatcherStatistics",
    "DynamicBatcher",
    "ModelService",
    "Receipt",
    "Recovering",
    "ReplicaStatistics",
    "Rollout",
    "TenantStatistics",
    "serve",
]
