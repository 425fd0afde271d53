"""Where a repository's files are looked up, and what Hugging Face's errors mean, in one line each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub import errors as hub_errors
from safetensors import SafetensorError

from clasp_core.errors import UserError

PROBE_S = 5.0
"""How long the Hub may take to answer before only the local cache is used (its own retries take 23 s a file)."""


@dataclass(frozen=True, slots=True)
class Access:
    """How files of a repository are looked up: which revision, and whether the network may be asked."""

    revision: str | None
    local_files_only: bool

    def options(self) -> dict[str, Any]:
        """Keyword arguments of `from_pretrained`."""
        return {"revision": self.revision, "local_files_only": self.local_files_only}


def access_to(repo: str, revision: str | None) -> Access:
    """The access to a local folder (which has no revisions), or to a repository of the Hub or its cache."""
    is_local = is_folder(repo)
    return Access(None if is_local else revision, is_local or not hub_answers())


def hub_answers() -> bool:
    """Whether the Hub can be reached within seconds; HF_HUB_OFFLINE is respected."""
    if huggingface_hub.is_offline_mode():
        return False
    try:
        huggingface_hub.get_session().head(huggingface_hub.constants.ENDPOINT, timeout=PROBE_S)
    except Exception:  # httpx or httpx2, by release; whatever the reason, the cache is what remains
        return False
    return True


def commit_of(repo: str, revision: str | None) -> str | None:
    """The commit of the cached configuration of a Hub repository, or None."""
    cached = huggingface_hub.try_to_load_from_cache(repo, "config.json", revision=revision)
    return Path(cached).parent.name if isinstance(cached, str) else None


EXPLANATIONS: tuple[tuple[type[BaseException] | tuple[type[BaseException], ...], str], ...] = (
    (hub_errors.GatedRepoError,
     "{repo} is gated: accept its licence at https://huggingface.co/{repo}, then log in with `hf auth login` (or set "
     "HF_TOKEN); or give a local folder as model.repo=/path/to/checkpoint"),
    (hub_errors.RepositoryNotFoundError,
     "there is no repository {repo} on the Hub, or it is private (log in with `hf auth login`); check model.repo"),
    (hub_errors.RevisionNotFoundError, "{repo} has no revision {revision!r}; check model.revision"),
    ((hub_errors.LocalEntryNotFoundError, hub_errors.OfflineModeIsEnabled),
     "{repo} is not in the local cache and the Hub cannot be reached: check the network and HF_HUB_OFFLINE, or give a "
     "local folder as model.repo=/path/to/checkpoint"),
    (hub_errors.EntryNotFoundError, "{repo} lacks a file that a checkpoint must have: {reason}"),
    (hub_errors.HFValidationError, "{repo!r} is neither a local folder nor a repository name; check model.repo"),
    (torch.OutOfMemoryError, "{repo} does not fit into memory: {reason}; use a smaller model.dtype or more GPUs"),
    (SafetensorError, "a weights file of {repo} is damaged ({reason}); delete it and fetch it again"),
)  # fmt: skip
"""Causes, the most specific first, and what a user is told. Any other error is told by its first line."""


@contextmanager
def explained(repo: str, revision: str | None = None) -> Iterator[None]:
    """Turn what Hugging Face raises while a checkpoint is opened into one line."""
    known = (OSError, ValueError, ImportError, torch.OutOfMemoryError, SafetensorError)
    try:
        yield
    except known as error:
        causes = list(_chain(error))
        hits = (text for kind, text in EXPLANATIONS if any(isinstance(cause, kind) for cause in causes))
        text = next(hits, "{repo} cannot be loaded: {reason}")
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(text.format(repo=repo, revision=revision, reason=reason)) from error


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or link.__context__


def is_folder(repo: str) -> bool:
    """Whether `repo` is a local checkpoint; a path that is none is refused."""
    folder = Path(repo)
    looks_local = repo.startswith((".", "/", "~")) or repo.count("/") > 1 or folder.exists()
    if looks_local and not (folder / "config.json").is_file():
        missing = "has no config.json" if folder.is_dir() else "does not exist"
        raise UserError(f"the checkpoint folder {repo} {missing}; model.repo= wants a Hub name or a checkpoint folder")
    return looks_local
