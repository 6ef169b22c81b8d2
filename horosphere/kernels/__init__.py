"""Distances and the numbers that make them exact: tensors in, tensors out, no manifold known here."""
