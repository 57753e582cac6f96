"""Computing on raw pointers: fifteen calls that go into one stream.

:class:`DeviceCompute` makes them on any device, by the kernels of its ops. A backend that has only such
calls gets its kernels by :func:`kernels_of`.
"""

from accel.compute.device_compute import DeviceCompute
from accel.compute.interface import ComputeBackend
from accel.compute.kernels import kernels_of

__all__ = ["ComputeBackend", "DeviceCompute", "kernels_of"]
