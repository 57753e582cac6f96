"""Memory that other libraries in the process use too: DLPack, the CUDA array interface, managed memory."""
