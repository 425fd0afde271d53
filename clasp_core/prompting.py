"""From the turns of a conversation to prompt ids: which text a model reads, and where its BOS comes from.

Three formats, chosen by configuration and never by a model's name:

- `chat`: the checkpoint's own chat template, for models that were trained with one.
- `plain`: turns and answers joined by blank lines, for base models. Nothing else is added, so a base model
  continues the text; the tokenizer puts its default special tokens (for Llama and Mistral one BOS) around it.
- `vicuna`: the text that Spec-Bench's evaluation gives to every model (FastChat's `vicuna_v1.1`), whatever
  the model was trained with. `</s>` is written out as text and becomes a token only where it is one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import Any, Protocol

from clasp_core.errors import UserError

VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
"""System text of Spec-Bench's prompts."""


class Tokenizer(Protocol):
    """What is used of a Hugging Face tokenizer."""

    bos_token_id: int | None
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text, with or without the tokenizer's default special tokens."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of ids."""

    def get_chat_template(self) -> str:
        """The Jinja source of the chat template; a `ValueError` where there is none."""

    def apply_chat_template(self, conversation: list[dict[str, str]], **options: Any) -> Any:
        """A conversation, written as the template says."""


class Prompter:
    """Writes prompts in one format for one tokenizer.

    Errors: a `UserError` for a missing tokenizer, an unknown style, or `chat` without a template.
    """

    def __init__(self, tokenizer: Tokenizer | None, style: str):
        if tokenizer is None:
            raise UserError("this model has no tokenizer, so questions cannot be encoded; choose another model")
        if style not in STYLES:
            raise UserError(f"unknown prompt format {style!r}; known are {', '.join(STYLES)} (model.prompt=...)")
        self.style = style
        self._tokenizer = tokenizer
        self._write = WRITERS.get(style, self._chat)
        self._template = _chat_template(tokenizer) if style == "chat" else self._write(["{q1}", "{q2}"], ["{a1}"])

    @property
    def template_sha256(self) -> str:
        """Hash of the format's text: the chat template's source, or a two-turn example of the others."""
        return hashlib.sha256(self._template.encode()).hexdigest()

    def text(self, turns_so_far: Sequence[str], answers: Sequence[str]) -> str:
        """The prompt before tokenisation: all turns, the answers between them, and the cue for the next one."""
        if not turns_so_far or len(answers) != len(turns_so_far) - 1:
            raise ValueError(f"{len(turns_so_far)} turns need {len(turns_so_far) - 1} answers, got {len(answers)}")
        return self._write(turns_so_far, answers)

    def ids(self, turns_so_far: Sequence[str], answers: Sequence[str]) -> list[int]:
        """Prompt ids. A chat template writes its own special tokens; otherwise the tokenizer's defaults apply.

        There is never a second BOS, and never an EOS that the tokenizer appended of its own accord.
        """
        own_specials = self.style == "chat"
        ids = self._tokenizer.encode(self.text(turns_so_far, answers), add_special_tokens=not own_specials)
        ids = self._single_bos(list(ids))
        return ids if own_specials else self._without_final_eos(ids)

    def text_of(self, ids: Sequence[int]) -> str:
        """An answer's text without special tokens and outer white space; what the next turn quotes."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True).strip()

    def _chat(self, turns: Sequence[str], answers: Sequence[str]) -> str:
        messages = _messages(turns, answers)
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _single_bos(self, ids: list[int]) -> list[int]:
        bos = self._tokenizer.bos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        return ids

    def _without_final_eos(self, ids: list[int]) -> list[int]:
        return ids[:-1] if len(ids) > 1 and ids[-1] == self._tokenizer.eos_token_id else ids


def _chat_template(tokenizer: Tokenizer) -> str:
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:
        raise UserError(
            "prompt format 'chat' needs a chat template, and this checkpoint has none; "
            "a base model takes model.prompt=plain (or model.prompt=vicuna, the text of Spec-Bench)"
        ) from error


def _messages(turns: Sequence[str], answers: Sequence[str]) -> list[dict[str, str]]:
    """User and assistant messages in turn, the last one the user's."""
    said: list[dict[str, str]] = []
    for turn, answer in zip_longest(turns, answers):
        said.append({"role": "user", "content": turn})
        if answer is not None:
            said.append({"role": "assistant", "content": answer})
    return said


def _plain(turns: Sequence[str], answers: Sequence[str]) -> str:
    return "\n\n".join(message["content"] for message in _messages(turns, answers))


def _vicuna(turns: Sequence[str], answers: Sequence[str]) -> str:
    """FastChat's text: a blank after a question, `</s>` and nothing else after an answer, none if it is empty."""
    parts = [VICUNA_SYSTEM, " "]
    for turn, answer in zip_longest(turns, answers, fillvalue=""):
        parts += ["USER: ", turn, " ASSISTANT:"]
        parts += [f" {answer}</s>"] if answer else []
    return "".join(parts)


WRITERS: Mapping[str, Callable[[Sequence[str], Sequence[str]], str]] = MappingProxyType(
    {"plain": _plain, "vicuna": _vicuna}
)
"""The formats that do not depend on the checkpoint, by name."""

STYLES = ("chat", *WRITERS)
"""Names of all prompt formats."""
