"""What the CPU has of each family of ops: kernels on raw pointers, and the samples that all backends are checked by; one module a family.

Kernels compute at once, on the calling thread, and validate nothing: :class:`accel.cpu.compute.CpuCompute` has done so. Sizes are at least 1, except where a
kernel says otherwise. Floating-point conditions (overflow, invalid, division by zero) show in the results alone, never as warnings.
"""
