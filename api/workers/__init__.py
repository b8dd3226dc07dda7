"""Several processes that serve one port: a supervisor, workers, and one that does billing's jobs for all of them."""
