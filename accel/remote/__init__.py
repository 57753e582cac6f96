"""A device whose context is in a child process: both halves, and the messages between them."""
