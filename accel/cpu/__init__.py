"""The CPU backend: streams on threads, memory in memfds, kernels in numpy. It computes everything it offers."""
