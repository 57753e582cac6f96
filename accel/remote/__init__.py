"""A device whose context lives in a child process: the client, the server, and what they say to each other."""
