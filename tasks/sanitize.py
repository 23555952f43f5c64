"""Text made harmless to look at: hidden characters become visible, Markdown is escaped, secrets become their names.

Texts come from outside: prompts, generations, names of models and datasets, errors. jinja2 escapes HTML; here is the rest.
"""

from __future__ import annotations

import logging
import os
import re
import unicodedata

# Other: control, format (bidirectional overrides, zero-width), surrogate. Line breaks and tabs are shown as text, too.
HIDDEN = {"Cc", "Cf", "Cs"}
MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+!|<>~&$])")
SECRET_NAMES = re.compile("TOKEN|PASSWORD|SECRET|API_KEY|ACCESS_KEY|CREDENTIAL|AUTH_STRING|CONNECTION_URL|STORE_URI", re.I)
SHORTEST = 6  # a shorter value occurs by chance, and replacing it would garble texts
USER_INFO = re.compile(r"(?<=://)[^/\s@]+(?=@)")  # of an address: user:password
LOGGERS = ("prefect.flow_runs", "prefect.task_runs")


def visible(text: str) -> str:
    """Return ``text`` with each control and invisible character replaced by its escape, e.g. ``\\x1b``; one line."""
    return "".join(
        character.encode("unicode_escape").decode() if unicodedata.category(character) in HIDDEN else character
        for character in text
    )


def markdown(text: str) -> str:
    """Return ``text`` so that Markdown shows it as it is, also inside a table's cell."""
    return MARKDOWN.sub(r"\\\1", visible(text)).replace("\\<", "&lt;").replace("\\>", "&gt;").replace("\\&", "&amp;")


def redact(text: str) -> str:
    """Return ``text`` with each secret of the environment replaced by the name of its variable."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and SECRET_NAMES.search(name) and value in text:
            text = text.replace(value, f"[{name}]")
    return USER_INFO.sub("[user]", text)


class Redact(logging.Filter):
    """Redacts what is logged, tracebacks included."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = redact(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = redact(logging.Formatter().formatException(record.exc_info))
        return True


def guard_logs() -> None:
    """Have the logs of this process's flow and task runs redacted before they are shown or sent to the Prefect server."""
    for logger in map(logging.getLogger, LOGGERS):
        for handler in logger.handlers:
            if not any(isinstance(present, Redact) for present in handler.filters):
                handler.addFilter(Redact())
