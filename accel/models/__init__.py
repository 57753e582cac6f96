"""Models on a device: inputs of bounded shapes, durable weights, and adapters to frameworks."""
