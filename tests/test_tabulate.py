"""A table in each format: nothing is lost, and no name breaks the markup."""

import argparse
import io
import os
import re

import pandas as pd
import pytest

from clasp_core.errors import UserError
from clasp_core.report.tabulate import FORMATS, Published, as_text, latex, number, publish, span, write

NASTY = r"a_b 50% x&y #1 $2 {3} \n ~ ^ <t> |p| [4] *s*"
TABLE = Published(
    title="Speed_ups",
    caption="Ratios, 100% ours & theirs",
    cells=pd.DataFrame([[NASTY, "1.50"], ["[plain]", None]], columns=["me|thod", "speed_up"]),
    data=pd.DataFrame({"method": [NASTY, "plain"], "value": [1.5, None]}),
    num_labels=1,
    notes=("a note | here",),
)


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_says_title_caption_cells_and_notes(form):
    text = as_text([TABLE], form)
    for word in ("Speed", "ours", "1.5", "plain", "a note"):
        assert word in text, word
    assert text.endswith("\n")


def test_csv_reads_back_as_the_numbers():
    text = as_text([TABLE], "csv")
    assert text.splitlines()[0] == "# Speed_ups. Ratios, 100% ours & theirs"
    frame = pd.read_csv(io.StringIO(text), skiprows=2)
    assert frame["method"].tolist() == [NASTY, "plain"]
    assert frame["value"].tolist()[0] == 1.5
    assert pd.isna(frame["value"].tolist()[1])


def test_markdown_lines_have_the_same_number_of_cells_whatever_is_in_them():
    lines = [line for line in as_text([TABLE], "markdown").splitlines() if line.startswith("|")]
    assert len(lines) == 4
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in lines} == {3}
    assert r"me\|thod" in lines[0]


def test_latex_escapes_every_character_that_it_reads_as_a_command():
    escaped = latex(NASTY)
    # what is left when the known escapes are gone must hold none of the special characters
    rest = re.sub(r"\\text[a-z]+\{\}|\\[_%&#${}]|\{\[\}|\{\]\}", "", escaped)
    assert not set(rest) & set(r"\_%&#${}~^<>|[]")
    for line in as_text([TABLE], "latex").splitlines():
        if line.endswith(r"\\"):
            assert len(re.findall(r"(?<!\\)&", line)) == 1
    # a row that begins with a bracket would be taken for the length behind the \\ of the row before it
    assert not re.search(r"\\\\\s*\[", as_text([TABLE], "latex"))


def test_latex_environments_and_braces_are_balanced():
    text = as_text([TABLE], "latex")
    assert text.count("\\begin{") == text.count("\\end{") == 2
    bare = re.sub(r"\\[{}]", "", text)
    assert bare.count("{") == bare.count("}")
    assert "{lr}" in text


def test_a_table_wider_than_the_terminal_comes_in_blocks_with_the_names(monkeypatch):
    from clasp_core.report import tabulate

    monkeypatch.setattr(tabulate, "WIDE", 40)
    names = [f"column_{index}" for index in range(9)]
    cells = pd.DataFrame([["clasp", *(f"{index}.25" for index in range(9))]], columns=["method", *names])
    text = as_text([Published("t", "c", cells, cells, 1)], "terminal")
    assert max(map(len, text.splitlines())) <= 40
    assert text.count("clasp") == text.count("method") == 3
    for index in range(9):
        assert text.count(f"column_{index}") == text.count(f"{index}.25") == 1


def test_a_file_is_written_whole_or_left_alone(tmp_path, capsys):
    path = tmp_path / "table.md"
    path.write_text("old")
    broken = Published("t", "c", TABLE.cells, TABLE.data, 1, notes=(None,))
    arguments = argparse.Namespace(format="markdown", out=str(path))
    with pytest.raises(AttributeError):
        publish([TABLE, broken], arguments)
    assert path.read_text() == "old"
    publish([TABLE], arguments)
    assert path.read_text() == as_text([TABLE], "markdown")
    assert capsys.readouterr().out == f"{path}\n"
    assert [each.name for each in tmp_path.iterdir()] == ["table.md"]
    with pytest.raises(UserError, match="cannot write"):
        write(tmp_path / "no" / "table.md", "x")


def test_unknown_numbers_are_written_as_such():
    assert span(None, 2.0) == span(1.0, None) == number(None) == "n/a"
    assert (span(1.0, 2.0), number(1.5)) == ("1.00-2.00", "1.50")


def test_a_link_is_kept_and_what_is_no_file_is_refused(tmp_path):
    target, link = tmp_path / "target.md", tmp_path / "link.md"
    target.write_text("old")
    link.symlink_to(target)
    write(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    os.mkfifo(pipe := tmp_path / "pipe")
    for other in (pipe, tmp_path):
        with pytest.raises(UserError, match="it is no regular file; name another --out"):
            write(other, "new")
    assert pipe.is_fifo()
