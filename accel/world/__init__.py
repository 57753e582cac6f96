"""Worlds: several devices as the ranks of one communicator, which survives the loss of a rank."""
