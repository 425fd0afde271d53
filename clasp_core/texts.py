"""The text behind stored rows: what each id that occurs stands for, and the questions. Made after the clock."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from clasp_core.records import Question, TurnRecord

SCHEMA = 1
"""Version of the layout of `texts.json`."""

Piece: TypeAlias = str | list[int]
"""A token's text, or its bytes where these are not whole characters by themselves."""


class Vocabulary(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str | None]:
        """The vocabulary's own spelling of ids; None for one that it does not have."""

    def get_added_vocab(self) -> dict[str, int]:
        """Tokens beside the model's, special ones among them, which are spelled as they read."""


def texts(rows: Iterable[TurnRecord], questions: Sequence[Question], vocabulary: Vocabulary | None) -> dict[str, Any]:
    """`pieces` by id, for the ids that the rows hold, and the questions' turns by task and question id; JSON-able."""
    turns: dict[str, dict[str, list[str]]] = {}
    for question in questions:
        turns.setdefault(question.task, {})[str(question.question_id)] = list(question.turns)
    found = pieces(occurring(rows), vocabulary) if vocabulary is not None else {}
    return {"schema": SCHEMA, "pieces": {str(token): piece for token, piece in found.items()}, "questions": turns}


def occurring(rows: Iterable[TurnRecord]) -> list[int]:
    """The ids that were emitted or drafted, ascending."""
    ids: set[int] = set()
    for row in rows:
        ids.update(row.output_ids or ())
        for drafted in row.rounds.drafted_ids if row.rounds is not None else ():
            ids.update(drafted)
    return sorted(ids)


def pieces(ids: Sequence[int], vocabulary: Vocabulary) -> dict[int, Piece]:
    """The text of each id, such that neighbours joined read as the answer does; unknown ids are left out."""
    letters = _letters() if _is_byte_level(vocabulary) else None
    as_read = set(vocabulary.get_added_vocab().values())
    spelled = zip(ids, vocabulary.convert_ids_to_tokens(list(ids)), strict=True)
    return {i: token if i in as_read else _piece(token, letters) for i, token in spelled if token is not None}


def _is_byte_level(vocabulary: Vocabulary) -> bool:
    """Whether the two bytes of an é are spelled as two printable letters; class names say less."""
    ids = vocabulary.encode("é", add_special_tokens=False)
    return "".join(token or "" for token in vocabulary.convert_ids_to_tokens(ids)).endswith("Ã©")


def _piece(token: str, letters: Mapping[str, int] | None) -> Piece:
    return _sentence_piece(token) if letters is None else _byte_level(token, letters)


def _byte_level(token: str, letters: Mapping[str, int]) -> Piece:
    """A letter for every byte; a letter that stands for none is text that the tokenizer left alone."""
    if any(letter not in letters for letter in token):
        return token
    return _text_or_bytes(bytes(letters[letter] for letter in token))


def _sentence_piece(token: str) -> Piece:
    """A low bar for a blank, and `<0xE2>` for a byte that has no token; anything else reads as it is spelled."""
    if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token):
        return _text_or_bytes(bytes([int(byte[1], 16)]))
    return token.replace("\u2581", " ")


def _text_or_bytes(content: bytes) -> Piece:
    try:
        return content.decode()
    except UnicodeDecodeError:
        return list(content)


def _letters() -> Mapping[str, int]:
    """The letter that stands for each byte in byte-level vocabularies: Latin-1 where it prints, else U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    shown = {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}
    return MappingProxyType(shown)
