"""horosphere: geometry-first manifolds for PyTorch."""
