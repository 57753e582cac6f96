"""Collectives on a GPU: NCCL. Their kernels are the world's, which launch in the groups that a context has joined."""

from __future__ import annotations

from accel_cuda.core.family import CudaPart
from accel_cuda.core.nccl import NCCL, NcclState

__all__ = ["PART"]

PART = CudaPart(libraries=(NCCL,), open=NcclState)
