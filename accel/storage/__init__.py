"""The memory of a device: buffers, durable data, pinned host memory, and values kept by name."""
