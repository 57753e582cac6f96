"""Memory that other libraries use too: DLPack, the CUDA array interface, managed memory."""
