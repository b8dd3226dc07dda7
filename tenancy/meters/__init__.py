"""Live meters of an account, taken before a request waits: the protocol and its implementations."""
