"""Adapters: a model of a framework, in the process where its context is. Each framework is imported by its own module only."""
