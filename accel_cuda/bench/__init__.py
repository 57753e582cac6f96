"""What ``accel bench --backend cuda`` measures: the way of an op, of data and of products, beside the driver, cuBLAS, CuPy and PyTorch."""

from __future__ import annotations

from accel_cuda.bench.suite import bench_suite

__all__ = ["bench_suite"]
