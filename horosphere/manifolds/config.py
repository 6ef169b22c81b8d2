"""Manifolds in files: a JSON-able dictionary of a manifold and back, by the names of a public registry."""

from __future__ import annotations

import inspect
import json
from typing import Any, TypeVar

from horosphere.manifolds._geoopt import geoopt
from horosphere.manifolds.chord import resolve
from horosphere.manifolds.hooks import own
from horosphere.manifolds.names import normal, what_it_spells
from horosphere.manifolds.parameter import allow_loading

__all__ = [
    "made_without_arguments",
    "manifold_config",
    "manifold_from_config",
    "register_manifold",
    "register_ours",
    "registered",
    "registered_names",
]

_Class = TypeVar("_Class", bound=type[geoopt.Manifold])
_CLASSES: dict[str, type[geoopt.Manifold]] = {}
_OURS: set[str] = set()  # the names among them that the library's own classes have


def register_manifold(name: str, cls: _Class) -> _Class:
    """Give a manifold class the name by which files, `GraphEmbedding(manifold=name)` and ``torch.load`` know it.

    A class whose constructor takes arguments describes itself: ``config()`` returns a JSON-able dictionary whose
    ``"type"`` is the name, and the class method ``from_config(dictionary)`` makes an equal manifold. A class without
    arguments needs neither.

    Args:
        name: not empty, not taken by another class (case and blanks make no difference), and nothing that
            :func:`.manifold_by_name` reads as a space of the library, such as "poincare", "H5" or "H2xS2".
        cls: a subclass of geoopt.Manifold.

    Returns:
        The class.

    Raises:
        TypeError: name is no string, or cls no manifold class.
        ValueError: the name is empty, that of another class, or that of a space of the library.
    """
    if not _is_text(name):
        raise TypeError(f"name must be a string, got {type(name).__name__}")
    if not _is_manifold_class(cls):
        raise TypeError(f"cls must be a subclass of geoopt.Manifold, got {cls!r}")
    if not normal(name):
        raise ValueError(f"name {name!r} is empty: choose another")
    if _CLASSES.get(name) is not cls:
        for taken, other in _CLASSES.items():
            if normal(taken) == normal(name) and not _same(cls, other):
                written = "" if taken == name else f" as {taken!r}"
                raise ValueError(f"name {name!r} is taken by {other.__qualname__}{written}: choose another")
        meaning = what_it_spells(name)
        if meaning is not None:
            raise ValueError(
                f"name {name!r} is understood by the library itself, as {meaning}: a class of your own would never be "
                "found by it, or would take its place; choose another"
            )
    return _keep(name, cls)


def register_ours(cls: _Class) -> _Class:
    """Register a class of the library under its own name."""
    _OURS.add(cls.__name__)
    return _keep(cls.__name__, cls)


def _keep(name: str, cls: _Class) -> _Class:
    _CLASSES[name] = cls
    return allow_loading(cls)


def _same(cls: type, other: type) -> bool:
    """Whether it is one class, perhaps defined again, as in a notebook."""
    return (other.__module__, other.__qualname__) == (cls.__module__, cls.__qualname__)


def _is_text(name: object) -> bool:
    return isinstance(name, str)


def _is_manifold_class(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, geoopt.Manifold)


def _kind(config: object) -> object:
    return config.get("type") if isinstance(config, dict) else None


def registered(name: object) -> type[geoopt.Manifold] | None:
    """The class of a registered name, None for any other."""
    return _CLASSES.get(name) if isinstance(name, str) else None


def registered_names() -> list[str]:
    """The names that classes outside of the library have."""
    return [name for name in _CLASSES if name not in _OURS]


def made_without_arguments(cls: type[geoopt.Manifold], name: str) -> geoopt.Manifold:
    """An instance of a registered class; ValueError where its constructor needs arguments."""
    needed = [p.name for p in _parameters(cls) if p.default is p.empty]
    if needed:
        raise ValueError(
            f"{name!r} names the class {cls.__name__}, whose constructor needs {', '.join(needed)}: give an instance, "
            f"{cls.__name__}({', '.join(f'{n}=...' for n in needed)}), in the place of the name"
        )
    return cls()


def _parameters(cls: type) -> list[inspect.Parameter]:
    """The arguments of a constructor, but for ``*args`` and ``**kwargs``."""
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [p for p in inspect.signature(cls).parameters.values() if p.kind not in kinds]


def manifold_config(manifold: geoopt.Manifold) -> dict[str, Any]:
    """The manifold as a JSON-able dictionary; :func:`manifold_from_config` is the inverse.

    Raises:
        TypeError: its class is not registered, takes arguments and has no ``config``, or has a ``config`` whose
            dictionary is none that JSON can keep.
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
        if _parameters(cls):
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
    try:
        json.dumps(found)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{cls.__name__}.config() must return what JSON can keep (dictionaries with string keys, lists, strings, "
            f"numbers, booleans, None), got {found!r}: {error}; convert tensors and arrays with .tolist()"
        ) from error
    return found


def manifold_from_config(config: dict[str, Any]) -> geoopt.Manifold:
    """The manifold that :func:`manifold_config` described.

    Raises:
        ValueError: the dictionary is no configuration, or names a class that nobody registered.
    """
    cls = registered(_kind(config))
    if cls is None:
        raise ValueError(
            f"not the configuration of a manifold: {config!r}; known types: {', '.join(_CLASSES)}; a class of your own "
            "is known after horosphere.register_manifold(name, class)"
        )
    make = getattr(cls, "from_config", None)
    return made_without_arguments(cls, str(_kind(config))) if make is None else make(config)
