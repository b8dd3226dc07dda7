"""The embedded engine: a process of its own that serves SGLang's HTTP surface on the CPU or one GPU."""
