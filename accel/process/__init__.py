"""A supervised child process and the channel to it; knows nothing of devices."""
