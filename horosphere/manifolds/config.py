"""Manifolds in files: a JSON-able dictionary of a manifold and back, by the names of a public registry."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import resolve
from horosphere.manifolds.hooks import own
from horosphere.manifolds.parameter import allow_loading

__all__ = ["manifold_config", "manifold_from_config", "register_manifold", "registered"]

_Class = TypeVar("_Class", bound=type[geoopt.Manifold])
_CLASSES: dict[str, type[geoopt.Manifold]] = {}


def register_manifold(name: str, cls: _Class) -> _Class:
    """Give a manifold class the name by which files, `GraphEmbedding(manifold=name)` and ``torch.load`` know it.

    A class whose constructor takes arguments describes itself: ``config()`` returns a JSON-able dictionary whose
    ``"type"`` is the name, and the class method ``from_config(dictionary)`` makes an equal manifold. A class without
    arguments needs neither.

    Args:
        name: not empty and not taken by another class.
        cls: a subclass of geoopt.Manifold.

    Returns:
        The class.

    Raises:
        TypeError: name is no string, or cls no manifold class.
        ValueError: the name is empty or that of another class.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    if not (isinstance(cls, type) and issubclass(cls, geoopt.Manifold)):
        raise TypeError(f"cls must be a subclass of geoopt.Manifold, got {cls!r}")
    other = _CLASSES.get(name)
    if not name or (other is not None and (other.__module__, other.__qualname__) != (cls.__module__, cls.__qualname__)):
        raise ValueError(f"name {name!r} is {f'taken by {other.__qualname__}' if other else 'empty'}: choose another")
    _CLASSES[name] = cls
    return allow_loading(cls)


def registered(name: object) -> type[geoopt.Manifold] | None:
    """The class of a registered name, None for any other."""
    return _CLASSES.get(name) if isinstance(name, str) else None


def manifold_config(manifold: geoopt.Manifold) -> dict[str, Any]:
    """The manifold as a JSON-able dictionary; :func:`manifold_from_config` is the inverse.

    Raises:
        TypeError: its class is not registered, or takes arguments and has no ``config``.
    """
    manifold = resolve(manifold)[0]
    cls = type(manifold)
    method = own(manifold, "config")
    names = [name for name, other in _CLASSES.items() if other is cls]
    if not names:
        raise TypeError(
            f"{cls.__name__} has no name for files: call horosphere.register_manifold({cls.__name__!r}, {cls.__name__})"
        )
    if method is None:
        if any(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in inspect.signature(cls).parameters.values()):
            raise TypeError(
                f"{cls.__name__} takes arguments, which a file must keep: define config() and the class method "
                "from_config(), see horosphere.register_manifold"
            )
        return {"type": names[0]}
    found = method()
    if not isinstance(found, dict) or found.get("type") not in names:
        raise TypeError(
            f'{cls.__name__}.config() must return a dictionary whose "type" is a registered name of the class '
            f"({', '.join(map(repr, names))}), got {found!r}"
        )
    return found


def manifold_from_config(config: dict[str, Any]) -> geoopt.Manifold:
    """The manifold that :func:`manifold_config` described.

    Raises:
        ValueError: the dictionary is no configuration, or names a class that nobody registered.
    """
    kind = config.get("type") if isinstance(config, dict) else None
    cls = registered(kind)
    if cls is None:
        raise ValueError(
            f"not the configuration of a manifold: {config!r}; known types: {', '.join(_CLASSES)}; a class of your own "
            "is known after horosphere.register_manifold(name, class)"
        )
    make = getattr(cls, "from_config", None)
    return cls() if make is None else make(config)
