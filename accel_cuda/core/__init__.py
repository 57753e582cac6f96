"""Contexts of a GPU: the driver, streams, events, memory, copies, programs."""
