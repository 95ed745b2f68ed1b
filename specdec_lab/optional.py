"""Libraries that only some of the lab needs, and that an extra of the package brings."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from specdec_lab.errors import SpecdecError


class MissingLibraryError(SpecdecError):
    """A library is not installed."""


def library(module: str, extra: str) -> Any:
    """Import a module.

    Args:
        module: by its full name.
        extra: of this package, which installs it.

    Raises:
        MissingLibraryError: it is not installed; names the extra.
    """
    try:
        return import_module(module)
    except ImportError as error:
        name = module.partition(".")[0].replace("_", "-")
        raise MissingLibraryError(f"{name} is missing; pip install 'specdec-lab[{extra}]'") from error
