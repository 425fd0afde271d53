"""The run folder `<results>/<machine>/<model>/<run_id>/`: append-only manifest and rows, and a summary.

`manifest.jsonl` gains a line at each change of status, and its last line counts. `rows.jsonl` gains the rows of a
turn at once. A line counts when its newline is there, so a kill loses at most the turn in flight. `texts.json`, which
no figure needs, holds the text behind the ids. A run that looks at something else than turns has an `analysis.jsonl`
beside empty rows.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import tempfile
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from clasp_core.errors import UserError
from clasp_core.provenance import differing, slug, value_at
from clasp_core.records import LATE, SCHEMA, Manifest, TurnRecord

MANIFEST, ROWS, SUMMARY, TEXTS = "manifest.jsonl", "rows.jsonl", "summary.json", "texts.json"
ANALYSIS = "analysis.jsonl"

Key = tuple[str, str, int, int, int]


def new_run_id() -> str:
    """A name that sorts by time and is unique without asking anyone, such as `20261129T181500Z-3f9a1c2e`."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:8]}"


class RunStore:
    """The one writer of a run folder; holds a lock on it until closed. Use it as a context manager.

    `done` holds the keys of the rows that were written without an error; those are never written again.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        """Lock the folder, whose two files need not exist; `create` and `resume` are the ways to get here."""
        self.folder = folder
        self.run_id = run_id
        self.done: set[Key] = set()
        self._rows = _open_for_append(folder / ROWS)
        self._lock()

    @classmethod
    def create(cls, results_dir: str | Path, machine: str, model: str, manifest: Manifest) -> RunStore:
        """Make the folder of a new run, named by the manifest's run_id, and write the manifest's first line."""
        folder = Path(results_dir).resolve() / slug(machine) / slug(model) / manifest.run_id
        try:
            folder.mkdir(parents=True, exist_ok=False)
        except FileExistsError:
            raise UserError(f"{folder} exists; each run needs a run_id of its own, see new_run_id()") from None
        except OSError as error:
            raise UserError(f"cannot make {folder}: {error.strerror}; set results_dir to another place") from error
        store = cls(folder, manifest.run_id)
        with store._closed_on_error():
            store.write_manifest(manifest)
        return store

    @classmethod
    def resume(
        cls,
        folder: str | Path,
        config_hash: str,
        fingerprint: Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
        ignore: Sequence[str] = (),
        planned: Collection[Key] | None = None,
    ) -> RunStore:
        """Reopen a run to finish it. Torn last lines are cut off; keys with an error only are open again.

        `config` and `ignore` are those that `config_hash` was computed from, and serve to name what differs. A row
        whose key is not `planned` is refused (None: all may stand there).
        Raises UserError for another configuration or fingerprint, for a damaged file, and while another writes.
        """
        folder = Path(folder).resolve()
        manifest = _read_manifest(folder)
        _check_same_config(folder, manifest, config_hash, config, ignore)
        _check_same_fingerprint(folder, manifest.fingerprint, "this run", fingerprint)
        store = cls(folder, manifest.run_id)
        with store._closed_on_error():
            store._continue(planned)
        return store

    def append(self, rows: Sequence[TurnRecord]) -> None:
        """Write the rows of one turn group in one go, on the disk when this returns.

        Raises UserError for a key that is there without an error or twice in `rows`, and for a full disk;
        ValueError for a row of another run or with NaN. Nothing is written then.
        """
        keys = [row.key for row in rows if row.error is None]
        for row in rows:
            if row.run_id != self.run_id:
                raise ValueError(f"row {row.key} is of run {row.run_id!r}, this folder is of {self.run_id!r}")
            if row.key in self.done or [other.key for other in rows].count(row.key) > 1:
                raise UserError(f"{self.folder / ROWS} has row {row.key} already; a turn is written once per run")
        _append(self._rows, self.folder / ROWS, b"".join(_line(row.to_json()) for row in rows))
        self.done.update(keys)

    def write_manifest(self, manifest: Manifest) -> None:
        """Append the manifest as the line that counts from now on."""
        if manifest.run_id != self.run_id:
            raise ValueError(f"manifest is of run {manifest.run_id!r}, this folder is of {self.run_id!r}")
        descriptor = _open_for_append(self.folder / MANIFEST)
        try:
            _append(descriptor, self.folder / MANIFEST, _line(manifest.to_json()))
        finally:
            os.close(descriptor)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write or replace `summary.json` atomically; raises ValueError for NaN and infinity, before writing."""
        text = json.dumps(summary, indent=2, allow_nan=False) + "\n"
        replace_file(self.folder / SUMMARY, text.encode())

    def write_texts(self, texts: Mapping[str, Any]) -> None:
        """Write or replace `texts.json` atomically; see `texts.texts` for what it holds."""
        replace_file(self.folder / TEXTS, _line(texts))

    def append_analysis(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write rows of an analysis, each with a `kind`; on the disk when this returns. ValueError for NaN."""
        descriptor = _open_for_append(self.folder / ANALYSIS)
        try:
            _append(descriptor, self.folder / ANALYSIS, b"".join(_line(row) for row in rows))
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Give up the lock; closing twice is fine."""
        if self._rows >= 0:
            os.close(self._rows)
            self._rows = -1

    def __enter__(self) -> RunStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._rows, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UserError(f"{self.folder} is being written by another process; wait for its end") from None

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _continue(self, planned: Collection[Key] | None) -> None:
        _drop_torn_line(self.folder / MANIFEST)
        _drop_torn_line(self.folder / ROWS)
        rows, _ = _read_rows(self.folder, self.run_id, planned)
        self.done = {row.key for row in rows if row.error is None}


def read_run(folder: str | Path) -> tuple[Manifest, list[TurnRecord]]:
    """The manifest and the rows that count, in file order: all without an error, else the last error of a key.

    A torn last line of either file is left out, with a note in the manifest. Raises UserError, with file and
    line, for a row of another schema or run and for a key that follows its own row without an error.
    """
    folder = Path(folder).resolve()
    manifest = _read_manifest(folder)
    rows, torn = _read_rows(folder, manifest.run_id)
    _fill_in(rows, manifest, folder / MANIFEST)
    if torn:
        manifest.notes.append(_torn_note(ROWS, torn))
    return manifest, rows


def read_texts(folder: str | Path) -> dict[str, Any] | None:
    """What `write_texts` stored, or None where a run has no such file; raises UserError for a damaged one."""
    path = Path(folder).resolve() / TEXTS
    if not path.exists():
        return None
    content = _object(path, 1, path.read_bytes())
    pieces, questions = content.get("pieces"), content.get("questions")
    well_formed = (
        isinstance(pieces, dict)
        and all(isinstance(piece, str | list) for piece in pieces.values())
        and isinstance(questions, dict)
        and all(isinstance(turns, dict) for turns in questions.values())
        and all(isinstance(turns, list) for task in questions.values() for turns in task.values())
    )
    if not well_formed:
        raise UserError(f"{path} is not of the shape that a run writes; delete it, and ids stand for the text")
    return content


def read_analysis(folder: str | Path) -> list[dict[str, Any]]:
    """The rows of a run's analysis, none where there is none; a torn last line is left out."""
    path = Path(folder).resolve() / ANALYSIS
    if not path.exists():
        return []
    return [_object(path, number, line) for number, line in enumerate(_complete_lines(path)[0], start=1)]


def read_runs(folders: Iterable[str | Path]) -> list[tuple[Manifest, list[TurnRecord]]]:
    """Several runs that may be compared; raises UserError, naming the field, if their fingerprints differ."""
    runs: list[tuple[Manifest, list[TurnRecord]]] = []
    paths = [Path(folder).resolve() for folder in folders]
    for path in paths:
        manifest, rows = read_run(path)
        if any(manifest.run_id == other.run_id for other, _ in runs):
            raise UserError(f"{path} is run {manifest.run_id}, which is given twice; name each run once")
        if runs:
            _check_same_fingerprint(path, manifest.fingerprint, str(paths[0]), runs[0][0].fingerprint)
        runs.append((manifest, rows))
    return runs


def _check_same_config(
    folder: Path, manifest: Manifest, config_hash: str, config: Mapping[str, Any] | None, ignore: Sequence[str]
) -> None:
    if manifest.config_hash == config_hash:
        return
    keys = differing(manifest.config, config, ignore) if config is not None else []
    what = _changes(keys, manifest.config, config or {}) or f"hash {manifest.config_hash}, now {config_hash}"
    raise UserError(f"{folder} was made with another configuration ({what}); start a new run, or undo the change")


def _check_same_fingerprint(folder: Path, stored: Mapping[str, Any], other_name: str, other: Mapping[str, Any]) -> None:
    if keys := differing(stored, other):
        raise UserError(
            f"{folder} and {other_name} cannot be mixed, their fingerprints differ ({_changes(keys, stored, other)}); "
            "measure both on one machine with one setting"
        )


def _changes(keys: Sequence[str], ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}: {value_at(ours, key)!r} against {value_at(theirs, key)!r}" for key in keys)


def _read_manifest(folder: Path) -> Manifest:
    path = folder / MANIFEST
    lines, torn = _complete_lines(path)
    if not lines:
        raise UserError(f"{path} holds no complete line, so the run never started; start a new run")
    row = _object(path, len(lines), lines[-1])
    if row.get("schema") != SCHEMA:
        raise UserError(f"{path}: manifest has schema {row.get('schema')!r}, this version reads {SCHEMA}")
    try:
        manifest = Manifest.from_json(row)
    except TypeError as error:
        raise UserError(f"{path}, line {len(lines)}: not a manifest ({error})") from error
    if torn:
        manifest.notes.append(_torn_note(MANIFEST, torn))
    return manifest


def _fill_in(rows: Sequence[TurnRecord], manifest: Manifest, path: Path) -> None:
    """Give rows what was found out about them after they were written."""
    by_key = {row.key: row for row in rows}
    for entry in manifest.late_divergences:
        try:
            row = by_key[tuple(entry["key"])]
            row.first_divergence, row.divergence_gap, row.divergence_bound = (entry[name] for name in LATE)
        except (KeyError, TypeError) as error:
            raise UserError(f"{path}: late_divergences is damaged ({type(error).__name__}: {error})") from error


def _torn_note(name: str, num_bytes: int) -> str:
    return f"the torn last line of {name} ({num_bytes} bytes) was left out"


def _read_rows(folder: Path, run_id: str, planned: Collection[Key] | None = None) -> tuple[list[TurnRecord], int]:
    """The rows that count, and how many bytes of a torn last line were left out."""
    path = folder / ROWS
    lines, torn = _complete_lines(path)
    latest: dict[Key, TurnRecord] = {}
    for number, line in enumerate(lines, start=1):
        row = _row(path, number, line, run_id)
        if planned is not None and row.key not in planned:
            raise UserError(
                f"{path}, line {number}: row {row.key} answers nothing that this run plans; remove the line"
            )
        earlier = latest.pop(row.key, None)
        if earlier is not None and earlier.error is None:
            raise UserError(f"{path}, line {number}: second row of {row.key}; the file was not written by one run")
        latest[row.key] = row
    return list(latest.values()), torn


def _row(path: Path, number: int, line: bytes, run_id: str) -> TurnRecord:
    try:
        row = TurnRecord.from_json(_object(path, number, line))
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}, line {number}: {error}") from error
    if row.run_id != run_id:
        raise UserError(f"{path}, line {number}: row of run {row.run_id!r} in the folder of run {run_id!r}")
    return row


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}, line {number}: not JSON ({error}); the file is damaged") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number}: not an object: {row!r:.60}; the file is damaged")
    return row


def _complete_lines(path: Path) -> tuple[list[bytes], int]:
    """The lines that end in a newline, and the number of bytes after the last one."""
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; name the folder of a run") from error
    return lines, len(rest)


def _drop_torn_line(path: Path) -> None:
    lines, torn = _complete_lines(path)
    if torn:
        os.truncate(path, sum(len(line) + 1 for line in lines))


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _open_for_append(path: Path) -> int:
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _append(descriptor: int, path: Path, data: bytes) -> None:
    """Append all of `data` and sync; what a failed or interrupted write has left is taken back."""
    before = os.fstat(descriptor).st_size
    try:
        written = os.write(descriptor, data)
        while written < len(data):
            written += os.write(descriptor, data[written:])
        os.fsync(descriptor)
    except BaseException as error:
        os.ftruncate(descriptor, before)
        if isinstance(error, OSError):
            raise UserError(f"cannot write {path}: {error.strerror}; make room and resume the run") from error
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Put a file in place whole or not at all; a failure leaves what was there before.

    A link's target is replaced, not the link. OSError for what is no file (a device, a folder).
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is no regular file")
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
