"""The laws every manifold obeys, as a test class to inherit: :class:`ManifoldContract`. Needs pytest."""

from horosphere.testing.contract import ManifoldContract

__all__ = ["ManifoldContract"]
