"""The one import of geoopt: its module-level ``torch.jit.script`` decorators warn once per function on import."""

import warnings

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message=r".*torch\.jit\.script.*", category=DeprecationWarning)
    import geoopt

__all__ = ["geoopt"]
