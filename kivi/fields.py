"""Fields of a configuration, read from a YAML file; JSON is YAML too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


class FieldsError(ValueError):
    """A file that holds no fields; the message is one sentence that names it and what is wrong."""


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which refuses a key that is there twice: of two, it would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = f"{key.tag} {key.value}"
            if isinstance(key, yaml.ScalarNode) and name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


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
