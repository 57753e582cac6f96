"""Children on other machines: the agent that starts them there, and the connections to it."""
