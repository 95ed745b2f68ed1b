"""JSON Schemas of the result files, shipped in the package, and the check that every written file passes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal

from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import extend
from referencing import Registry, Resource

SCHEMA_VERSION = 4
"""Version of both files; it changes with them, together with a changelog entry."""

TOKEN_ID = {"type": "integer", "minimum": 0}

Kind = Literal["request", "summary"]


def load_schema(kind: Kind) -> dict[str, Any]:
    """Return the schema of a ``requests.jsonl`` row or of ``summary.json``."""
    return json.loads((resources.files("specdec_lab") / "schemas" / f"{kind}.schema.json").read_text("utf-8"))


def _items(validator: Any, items: Any, instance: Any, schema: Any) -> Iterator[ValidationError]:
    """Check a list as jsonschema does; lists of token ids in one pass, since theirs would take 20 ms a row."""
    if items == TOKEN_ID and isinstance(instance, list) and all(type(one) is int and one >= 0 for one in instance):
        return
    yield from Draft202012Validator.VALIDATORS["items"](validator, items, instance, schema)


_Validator = extend(Draft202012Validator, {"items": _items})


@cache
def _validator(kind: Kind) -> Any:
    request = Resource.from_contents(load_schema("request"))
    return _Validator(load_schema(kind), registry=Registry().with_resource("request.schema.json", request))


def fault(kind: Kind, document: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a document, the place first, or ``None``."""
    error = best_match(_validator(kind).iter_errors(document))
    return None if error is None else f"{error.json_path}: {error.message}"


def dumps(kind: Kind, document: Mapping[str, Any], indent: int | None = None) -> str:
    """Return a document as JSON text after checking it.

    Raises:
        ValueError: the document breaks its schema or holds NaN or infinity, which JSON has no words for.
    """
    found = fault(kind, document)
    if found is not None:
        raise ValueError(f"the {kind} document breaks its schema at {found}")
    return json.dumps(document, indent=indent, allow_nan=False, ensure_ascii=False)


def loads(text: str | bytes) -> Any:
    """Parse JSON strictly.

    Raises:
        ValueError: no JSON, or NaN or infinity in it.
    """
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
