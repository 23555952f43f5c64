"""Text from outside (prompts, generations, names of models and datasets) made harmless to look at.

HTML is escaped by jinja2; here is what HTML escaping leaves alone, and what a terminal and Markdown need.
"""

from __future__ import annotations

import re
import unicodedata

# Other: control, format (bidirectional overrides, zero-width), surrogate. Line breaks and tabs are shown as text, too.
HIDDEN = {"Cc", "Cf", "Cs"}
MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|<>~&$])")


def visible(text: str) -> str:
    """Return ``text`` with each control and invisible character replaced by its escape, e.g. ``\\x1b``; one line."""
    return "".join(
        character.encode("unicode_escape").decode() if unicodedata.category(character) in HIDDEN else character
        for character in text
    )


def markdown(text: str) -> str:
    """Return ``text`` so that Markdown shows it as it is, also inside a table's cell."""
    return MARKDOWN.sub(r"\\\1", visible(text)).replace("\\<", "&lt;").replace("\\>", "&gt;").replace("\\&", "&amp;")
