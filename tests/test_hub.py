"""What the Hub answers becomes one line with a way out, and a dead network costs seconds only."""

from __future__ import annotations

import importlib
import socket
from typing import Any

import huggingface_hub
import pytest
import torch
from checkpoints import source
from huggingface_hub import errors as hub_errors
from huggingface_hub.utils import hf_raise_for_status
from safetensors import SafetensorError
from transformers import AutoConfig

from clasp_core import hub
from clasp_core.errors import UserError


def answered(status: int, code: str = "") -> Exception:
    """What huggingface_hub itself raises for such an answer of the server."""
    http = importlib.import_module(hub_errors.Response.__module__.partition(".")[0])
    request = http.Request("HEAD", "https://huggingface.co/meta/llama/resolve/v9/config.json")
    try:
        hf_raise_for_status(http.Response(status, headers={"X-Error-Code": code}, request=request))
    except hub_errors.HfHubHTTPError as error:
        return error
    raise AssertionError("the answer was no error")


HUB_ERRORS = {
    "gated": (answered(401, "GatedRepo"), r"meta/llama is gated.*hf auth login.*model\.repo="),
    "no_repository": (answered(404, "RepoNotFound"), r"no repository meta/llama.*hf auth login"),
    "no_revision": (answered(404, "RevisionNotFound"), r"meta/llama has no revision 'v9'"),
    "no_file": (answered(404, "EntryNotFound"), r"meta/llama lacks a file"),
    "server_down": (answered(503), r"meta/llama cannot be loaded: "),
    "not_cached": (hub_errors.LocalEntryNotFoundError("no"), r"not in the local cache.*HF_HUB_OFFLINE.*model\.repo="),
    "offline": (hub_errors.OfflineModeIsEnabled("no"), r"not in the local cache.*HF_HUB_OFFLINE.*model\.repo="),
    "bad_name": (hub_errors.HFValidationError("no"), r"'meta/llama' is neither a local folder nor a repository name"),
    "out_of_memory": (torch.OutOfMemoryError("CUDA"), r"does not fit into memory.*smaller model\.dtype"),
    "damaged": (SafetensorError("header too large"), r"damaged"),
}


@pytest.mark.parametrize(("error", "message"), HUB_ERRORS.values(), ids=HUB_ERRORS)
@pytest.mark.parametrize("wrapped", [False, True])
def test_errors_of_the_hub_become_one_line_with_a_way_out(monkeypatch, error, message, wrapped):
    def fail(*args: Any, **kwargs: Any) -> None:
        if not wrapped:
            raise error
        raise OSError("We couldn't load it.\nSee the docs.") from error

    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    with pytest.raises(UserError, match=message) as caught:
        source("meta/llama", revision="v9").config()
    assert "\n" not in str(caught.value)


def test_bugs_are_not_dressed_up_as_user_errors(monkeypatch):
    def fail(*args: Any, **kwargs: Any) -> None:
        raise TypeError("unexpected keyword")

    monkeypatch.setattr(hub, "hub_answers", lambda: True)
    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    with pytest.raises(TypeError):
        source("meta/llama").config()


def test_unreachable_hub_is_not_asked_again_and_again(monkeypatch):
    asked: list[str] = []

    def refuse(*args: Any, **kwargs: Any) -> None:
        asked.append(args[0])
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(UserError, match="not in the local cache and the Hub cannot be reached"):
        source("clasp-tests/no-such-model").config()
    assert len(asked) <= 2  # ours, and one of huggingface_hub for its user agent; it would retry five times a file


def test_offline_mode_asks_nobody(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "is_offline_mode", lambda: True)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: pytest.fail("the network was asked"))
    assert not hub.hub_answers()


def test_commit_is_the_cached_snapshots(tmp_path, monkeypatch):
    snapshot = tmp_path / "models--a--b/snapshots/0123456789abcdef0123456789abcdef01234567/config.json"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, file, revision: str(snapshot))
    assert hub.commit_of("a/b", "main") == "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda repo, file, revision: None)
    assert hub.commit_of("a/b", "main") is None
