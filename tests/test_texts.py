"""The text kept beside the rows: it reads as the tokenizer reads, and costs a run nothing that it could lose."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clasp_core.errors import UserError
from clasp_core.records import Question, RoundTrace, TurnRecord
from clasp_core.store import TEXTS, read_texts
from clasp_core.texts import Piece, occurring, pieces, texts
from clasp_core.tiny import byte_tokenizer


def joined(found: list[Piece]) -> str:
    return b"".join(piece.encode() if isinstance(piece, str) else bytes(piece) for piece in found).decode()


@pytest.mark.parametrize("text", ["plain words", "Grüße, 你好 🙂\n\ttab", "<script>\u2028</script>\u202e\x00\x7f\xad"])
def test_pieces_of_a_byte_level_vocabulary_join_to_the_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    found = pieces(ids, tokenizer)
    assert joined([found[i] for i in ids]) == text == tokenizer.decode(ids)


def test_part_of_a_character_is_kept_as_bytes_and_a_special_token_as_it_reads() -> None:
    tokenizer = byte_tokenizer()
    first, second = tokenizer.encode("é", add_special_tokens=False)
    assert pieces([first, second, 1], tokenizer) == {first: [0xC3], second: [0xA9], 1: "<|end|>"}


class SentencePieces:
    """A vocabulary that spells blanks as low bars and falls back to bytes; id 9 is in the model's head only."""

    SPELLED = ("\u2581the", "<0xC3>", "<0x41>", "</s>", "\u2581", "é")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [4, 5]

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        return [self.SPELLED[i] if i < len(self.SPELLED) else None for i in ids]

    def get_added_vocab(self) -> dict[str, int]:
        return {"</s>": 3}


def test_pieces_of_a_vocabulary_of_words_read_with_blanks_and_unknown_ids_are_left_out() -> None:
    assert pieces([0, 1, 2, 3, 4, 9], SentencePieces()) == {0: " the", 1: [0xC3], 2: "A", 3: "</s>", 4: " "}


def row(ids: list[int] | None, drafted: list[list[int]]) -> TurnRecord:
    trace = RoundTrace(drafted_ids=drafted) if drafted else None
    error = None if ids else "boom"
    return TurnRecord("r", "m", "ar", "qa", "qa", 1, 0, 0, 0, output_ids=ids, rounds=trace, error=error)


def test_every_id_that_was_emitted_or_drafted_has_its_piece_and_every_question_its_turns() -> None:
    rows = [row([40, 41], [[42], []]), row(None, [])]
    assert occurring(rows) == [40, 41, 42]
    questions = [Question(1, "qa", "qa", ("Where?", "When?")), Question(1, "rag", "rag", ("Who?",))]
    found = texts(rows, questions, byte_tokenizer())
    assert set(found["pieces"]) == {"40", "41", "42"}
    assert found["questions"] == {"qa": {"1": ["Where?", "When?"]}, "rag": {"1": ["Who?"]}}
    assert texts(rows, questions, None)["pieces"] == {}


def test_a_run_without_texts_has_none_and_damaged_ones_are_named(tmp_path: Path) -> None:
    assert read_texts(tmp_path) is None
    (tmp_path / TEXTS).write_text("{")
    with pytest.raises(UserError, match=r"texts\.json, line 1: not JSON"):
        read_texts(tmp_path)


@pytest.mark.parametrize(
    "content",
    [{}, {"pieces": [], "questions": {}}, {"pieces": {"1": 2}, "questions": {}}, {"pieces": {}, "questions": None},
     {"pieces": {}, "questions": {"qa": ["Where?"]}}, {"pieces": {}, "questions": {"qa": {"1": "Where?"}}}],
)  # fmt: skip
def test_texts_of_another_shape_are_named(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / TEXTS).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"texts\.json is not of the shape that a run writes; delete it"):
        read_texts(tmp_path)
