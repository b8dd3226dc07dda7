"""The whole gateway against the scripted engine, over real sockets."""
