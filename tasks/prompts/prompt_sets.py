"""Prompt sets: rows from ``datasets``, what their texts are, and a digest that says whether two nights saw the same."""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Sequence
from typing import Any

from pydantic import JsonValue

from kivi.measure import MeasureError
from kivi.measure.answers.questions import Question
from tasks.config import GENERATED, Config, PromptSetConfig, template_columns
from tasks.prompts.sources import PromptSetError, open_source

__all__ = ["PromptSet", "PromptSetError", "load_prompt_set"]

# What makes a text of a row of the built-in sets, and the columns that scorers need beside it.
TEMPLATES = {
    "humaneval": "{prompt}{canonical_solution}",
    "retrieval": "{context}\n\nQuestion: {question}\nAnswer: {answer}",
    **dict.fromkeys((*GENERATED, "topics"), "{text}"),
}
KEPT = {
    "humaneval": ("task_id",),
    "retrieval": ("id", "question", "answer", "depth", "tokens"),
    **dict.fromkeys(GENERATED, ("id", "answer", "depth", "tokens")),
}
ANSWERS = {"humaneval": "canonical_solution", "retrieval": "answer", **dict.fromkeys(GENERATED, "answer")}


class PromptSet(Config):
    """Rows in canonical form, where they come from, and their SHA-256.

    A row has its ``text``, or the ``messages`` of a chat, and for built-in sets the columns that scorers need. The digest is
    over the rows as they are here, so it changes with every character and with nothing else.
    """

    name: str
    rows: tuple[dict[str, JsonValue], ...]
    source: str
    revision: str | None
    split: str
    sha256: str
    note: str

    def texts(self, tokenizer: Any = None) -> list[str]:
        """Return what the model reads, a text a row.

        Args:
            tokenizer: The model's; chats need it for its chat template.

        Raises:
            PromptSetError: the set holds chats, and there is no chat template.
        """
        return [str(row["text"]) if "text" in row else self._chat(row, tokenizer) for row in self.rows]

    def questions(self) -> list[Question]:
        """Return each row as a question with its right answer, in order."""
        return [Question(str(row["text"]), str(row["answer"]), _depth(row)) for row in self.rows]

    @property
    def chats(self) -> bool:
        """Whether texts depend on the model's chat template."""
        return "messages" in self.rows[0]

    def _chat(self, row: dict[str, JsonValue], tokenizer: Any) -> str:
        if getattr(tokenizer, "chat_template", None) is None:
            raise PromptSetError(f"prompt set {self.name!r}: chat_template=true, but the model has no chat template")
        messages: Any = row["messages"]
        reply_is_due = messages[-1]["role"] != "assistant"
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=reply_is_due)
        return str(text)


def load_prompt_set(config: PromptSetConfig) -> PromptSet:
    """Read a prompt set; no model is needed.

    Raises:
        PromptSetError: the set cannot be read, is empty, is not the revision asked for, or a row has no text.
    """
    wanted = _columns(config)
    source = open_source(config, wanted)
    table = source.table
    for name in wanted:
        if name not in table.columns:
            raise PromptSetError(
                f"prompt set {config.name!r}: no column {name!r}; there are {', '.join(map(repr, table.columns))}"
            )
    rows = tuple(_canonical(config, index, row) for index, row in enumerate(table.rows))
    return PromptSet(
        name=config.name,
        rows=rows,
        source=config.source,
        revision=source.revision,
        split=config.split,
        sha256=digest(rows),
        note=_note(config, table.found),
    )


def digest(rows: Sequence[dict[str, JsonValue]]) -> str:
    """Return the SHA-256 of rows as canonical JSON lines: keys sorted, no spaces, ASCII."""
    total = hashlib.sha256()
    for row in rows:
        total.update(json.dumps(row, sort_keys=True, separators=(",", ":")).encode() + b"\n")
    return total.hexdigest()


def _note(config: PromptSetConfig, found: int) -> str:
    if config.limit is None:
        return f"all {found} rows"
    if config.limit > found:
        return f"all {found} rows: the limit asks for {config.limit}, and there are no more"
    return f"the first {config.limit} of {found} rows"


def _template(config: PromptSetConfig) -> str | None:
    own = any((config.column, config.template, config.messages))
    return config.template if own else TEMPLATES[config.source]


def _columns(config: PromptSetConfig) -> list[str]:
    """Return the columns that a row's text and its scorers need."""
    template = _template(config)
    answer = config.answer or (ANSWERS[config.source] if config.answers is not None else None)
    named = (config.column, config.messages, answer, *KEPT.get(config.source, ()))
    columns = [name for name in named if name] + (template_columns(template) if template else [])
    if not columns or (template and not template_columns(template)):
        raise PromptSetError(f"prompt set {config.name!r}: template={template!r} names no column; write one as {{column}}")
    return list(dict.fromkeys(columns))


def _canonical(config: PromptSetConfig, index: int, row: dict[str, Any]) -> dict[str, JsonValue]:
    """Return the part of a row that matters: its text or its chat, and what scorers need."""
    canonical: dict[str, JsonValue] = {name: row[name] for name in KEPT.get(config.source, ())}
    if config.messages:
        messages = _messages(config, index, row[config.messages])
        if config.chat_template:
            return {**canonical, "messages": messages}
        return {**canonical, "text": "\n\n".join(message["content"] for message in messages)}
    text = _text(config, index, row)
    if config.answers is not None:
        canonical["answer"] = _answer(config, index, row, text)
    if config.chat_template:
        return {**canonical, "messages": [{"role": "user", "content": text}]}
    return {**canonical, "text": text}


def _text(config: PromptSetConfig, index: int, row: dict[str, Any]) -> str:
    template = _template(config)
    if template is None:
        value = row[str(config.column)]
        if not isinstance(value, str):
            raise PromptSetError(f"prompt set {config.name!r}: row {index}: {config.column!r} holds {value!r:.60}, not text")
        return value
    parts = []
    for literal, name, _, _ in string.Formatter().parse(template):
        parts.append(literal)
        if name is not None:
            value = row[name]
            if not isinstance(value, str | int | float):
                raise PromptSetError(f"prompt set {config.name!r}: row {index}: {name!r} holds {value!r:.60}, not text")
            parts.append(str(value))
    return "".join(parts)


def _answer(config: PromptSetConfig, index: int, row: dict[str, Any], text: str) -> str:
    answer = str(row[config.answer or ANSWERS[config.source]])
    try:
        Question(text, answer)
    except MeasureError as error:
        raise PromptSetError(f"prompt set {config.name!r}: row {index}: {error}") from None
    return answer


def _depth(row: dict[str, JsonValue]) -> float | None:
    depth = row.get("depth")
    return float(depth) if isinstance(depth, int | float) else None


def _messages(config: PromptSetConfig, index: int, value: Any) -> Any:
    """Return ``[{"role": ..., "content": ...}, ...]``, other keys left out."""
    if not isinstance(value, list) or not value:
        raise PromptSetError(f"prompt set {config.name!r}: row {index}: {config.messages!r} holds {value!r:.60}, not messages")
    for message in value:
        fields = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if not all(isinstance(field, str) for field in fields):
            raise PromptSetError(
                f"prompt set {config.name!r}: row {index}: the message {message!r:.60} needs a role and a content, both text"
            )
    return [{"role": message["role"], "content": message["content"]} for message in value]
