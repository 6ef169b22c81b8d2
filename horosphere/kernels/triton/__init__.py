"""Triton kernels and their launchers. Imported only by the operators, when Triton serves a call."""
