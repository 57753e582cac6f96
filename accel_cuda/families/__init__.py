"""The families of ops: what each one calls on a GPU, and the CUDA C++ of its own kernels."""
