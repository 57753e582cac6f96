"""What the CPU has of each family of ops: kernels on raw pointers, and the samples that all backends are checked by; one module a family.

Kernels submit what computes to the stream, and validate nothing: the op's plan has done so. Floating-point
conditions (overflow, invalid, division by zero) show in the results alone, never as warnings.
"""
