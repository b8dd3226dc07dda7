"""The `pagegate` command: one file per group of commands. Thin: the work is in the packages below."""
