"""What a step computes between its matrix products: in torch, or compiled from `native.c` where there is a compiler."""
