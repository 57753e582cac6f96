"""What ``accel bench --backend cuda`` measures: awaiting the smallest kernel, beside the driver, CuPy and PyTorch."""

from __future__ import annotations

from accel_cuda.bench.suite import bench_suite

__all__ = ["bench_suite"]
