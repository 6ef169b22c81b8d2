"""Other libraries with horosphere inside; each module imports its library only when it is used."""

from horosphere.integrations import transformers

__all__ = ["transformers"]
