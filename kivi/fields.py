"""Fields of a configuration, read from a YAML file; JSON is YAML too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MAX_VALUES = 100_000


class FieldsError(ValueError):
    """A file that holds no fields; the message is one sentence that names it and what is wrong."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which refuses a key that is there twice: of two, it would silently take the last.

    A few lines of aliases of aliases stand for billions of values, which whatever reads them visits one by one: refused too.
    """

    def get_single_node(self) -> yaml.Node | None:
        node = super().get_single_node()
        if node is not None and _size(node, {}) > MAX_VALUES:
            raise yaml.composer.ComposerError(None, None, f"more than {MAX_VALUES:,} values, aliases written out")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = f"{key.tag} {key.value}"
            if isinstance(key, yaml.ScalarNode) and name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Return how many values ``node`` has with its aliases written out; one that holds itself has too many."""
    if id(node) not in known:
        known[id(node)] = MAX_VALUES + 1
        pairs = isinstance(node, yaml.MappingNode)
        members = [member for pair in node.value for member in pair] if pairs else node.value
        known[id(node)] = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(_size(member, known) for member in members))
    return known[id(node)]


def read_fields(path: Path, *, expected: str = "a mapping of fields") -> dict[str, Any]:
    """Read fields from a YAML file.

    Raises:
        FieldsError: the file is missing, is not YAML, has a key twice, or holds something else than ``expected`` says.
    """
    try:
        fields = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # noqa: S506  a safe loader
    except (OSError, UnicodeDecodeError) as error:
        raise FieldsError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    except (yaml.YAMLError, RecursionError) as error:  # the parser recurses into brackets
        raise FieldsError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(fields, dict):
        raise FieldsError(f"{path}: expected {expected}, got {type(fields).__name__}")
    return fields
