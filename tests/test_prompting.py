"""Prompts are what the format says, to the letter, and their special tokens come once."""

from __future__ import annotations

import hashlib

import pytest
from tokenizers import processors

from clasp_core.errors import UserError
from clasp_core.prompting import Prompter
from clasp_core.tiny import CHAT_TEMPLATE, byte_tokenizer

SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
BOS, EOS = 0, 1


def prompter(style: str) -> Prompter:
    return Prompter(byte_tokenizer(), style)


def test_vicuna_first_turn_is_spec_benchs_text():
    assert prompter("vicuna").text(["Hi?"], []) == f"{SYSTEM} USER: Hi? ASSISTANT:"


def test_vicuna_second_turn_follows_the_answers_end_mark_without_a_blank():
    text = prompter("vicuna").text(["Hi?", "Why?"], ["Hello."])
    assert text == f"{SYSTEM} USER: Hi? ASSISTANT: Hello.</s>USER: Why? ASSISTANT:"


def test_vicuna_empty_answer_leaves_no_separator():
    text = prompter("vicuna").text(["Hi?", "Why?"], [""])
    assert text == f"{SYSTEM} USER: Hi? ASSISTANT:USER: Why? ASSISTANT:"


def test_plain_turns_and_answers_are_joined_by_blank_lines():
    assert prompter("plain").text(["One", "Two"], ["first"]) == "One\n\nfirst\n\nTwo"


def test_plain_single_turn_is_the_turn_itself():
    assert prompter("plain").text(["Translate German to English: Hallo"], []) == "Translate German to English: Hallo"


def test_chat_is_the_checkpoints_template():
    text = prompter("chat").text(["Hi", "Bye"], ["Yes"])
    assert text == "<|begin|><|user|>Hi<|end|><|assistant|>Yes<|end|><|user|>Bye<|end|><|assistant|>"


@pytest.mark.parametrize("style", ["chat", "plain", "vicuna"])
@pytest.mark.parametrize("turns", [["Hi"], ["Hi", "Bye"]])
def test_bos_comes_exactly_once(style, turns):
    ids = prompter(style).ids(turns, ["Yes"] * (len(turns) - 1))
    assert ids[0] == BOS
    assert ids.count(BOS) == 1


@pytest.mark.parametrize("style", ["plain", "chat"])
def test_bos_written_in_the_text_does_not_double_the_default_one(style):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE
    ids = Prompter(tokenizer, style).ids(["<|begin|>Hi"], [])
    assert ids[:2] != [BOS, BOS]


def test_tokenizer_without_bos_gets_none():
    tokenizer = byte_tokenizer()
    tokenizer.bos_token = None
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel()
    ids = Prompter(tokenizer, "vicuna").ids(["Hi"], [])
    assert BOS not in ids
    assert tokenizer.decode(ids) == f"{SYSTEM} USER: Hi ASSISTANT:"


def test_eos_that_a_tokenizer_appends_is_not_in_the_prompt():
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", BOS), ("<|end|>", EOS)]
    )
    assert tokenizer.encode("Hi")[-1] == EOS
    assert Prompter(tokenizer, "plain").ids(["Hi"], []) == byte_tokenizer().encode("Hi")


def test_chat_ids_are_those_of_the_template_tokenised_by_hugging_face():
    tokenizer = byte_tokenizer()
    messages = [{"role": "user", "content": "Größe 12 µm?"}]
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Prompter(tokenizer, "chat").ids(["Größe 12 µm?"], []) == theirs


def test_chat_template_alone_decides_about_special_tokens():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert Prompter(tokenizer, "chat").ids(["Hi"], []) == tokenizer.encode("Hi", add_special_tokens=False)


def test_chat_without_a_template_is_refused_and_names_the_way_out():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match=r"has none; a base model takes model\.prompt=plain"):
        Prompter(tokenizer, "chat")
    assert Prompter(tokenizer, "plain").ids(["Hi"], [])


def test_missing_tokenizer_is_refused():
    with pytest.raises(UserError, match="no tokenizer"):
        Prompter(None, "plain")


def test_unknown_style_is_refused_and_names_the_known_ones():
    with pytest.raises(UserError, match=r"'raw'.*chat, plain, vicuna"):
        prompter("raw")


@pytest.mark.parametrize(("turns", "answers"), [([], []), (["a"], ["b"]), (["a", "b"], [])])
def test_turns_and_answers_must_alternate_and_end_with_a_turn(turns, answers):
    with pytest.raises(ValueError, match="answers"):
        prompter("plain").text(turns, answers)


def test_template_hash_is_the_templates_and_not_the_models_name():
    tokenizer = byte_tokenizer()
    tokenizer.name_or_path = "some/vicuna-13b"
    expected = hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()
    assert Prompter(tokenizer, "chat").template_sha256 == expected
    tokenizer.chat_template = CHAT_TEMPLATE + " "
    assert Prompter(tokenizer, "chat").template_sha256 != expected


def test_every_format_has_a_hash_of_its_own():
    assert len({prompter(style).template_sha256 for style in ("chat", "plain", "vicuna")}) == 3


def test_answer_text_has_no_special_tokens_and_no_outer_white_space():
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode(" Paris.\n", add_special_tokens=False)
    assert prompter("chat").text_of([BOS, *ids, EOS]) == "Paris."
