"""Loops compiled by numba for large float32 calls on CPUs; importing a module of loops imports numba."""
