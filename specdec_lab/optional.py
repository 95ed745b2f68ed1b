"""Libraries that only some of the lab needs, and that an extra of the package brings."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from specdec_lab.errors import SpecdecError, one_line


class MissingLibraryError(SpecdecError):
    """A library is not installed, or in a version that does not suit."""


def library(module: str, extra: str) -> Any:
    """Import a module.

    Args:
        module: by its full name.
        extra: of this package, which installs it.

    Raises:
        MissingLibraryError: it is not installed, or cannot be loaded; names the extra.
    """
    package = module.partition(".")[0]
    try:
        return import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        what = "is missing" if missing else f"cannot be loaded ({one_line(error)})"
        remedy = f"pip install 'specdec-lab[{extra}]' brings a version that suits"
        raise MissingLibraryError(f"{package.replace('_', '-')} {what}; {remedy}") from error
