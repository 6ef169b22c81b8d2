"""Kernels as loops over cache-sized tiles, in plain torch operations that run on any device."""
