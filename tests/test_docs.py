"""The pages that show code: every block of Python runs, and what it prints is what stands below it.

A page is read from top to bottom, in a folder of its own. Its ``python`` blocks share one namespace, and the ``text``
block after one is what it printed, an error of ours included. A block that begins with the name of a file (``#
train.py``) is that file. A ``console`` block that starts ranks (``$ meshwright run``) or asks a quick verb (``$
meshwright explain``) holds what they print. Blocks of another language (``py``, none) do not run. Rounding noise is
not compared: it differs between machines.

    python tests/test_docs.py docs/tutorial/tour.md      writes the page with what its blocks print now
"""

from __future__ import annotations

import contextlib
import difflib
import io
import linecache
import os
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.breadth import quick

ROOT = Path(__file__).parents[1]
PROSE = tuple(
    str(p.relative_to(ROOT)) for p in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md")))
)

FIRST = ("README.md", "docs/tutorial/first-steps.md")

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VERB = re.compile(r"\$ meshwright ((?:plan|explain|estimate|diff|convert) .*)\n(?!\$)(?=.)")
RUN = re.compile(r"\$ meshwright (run .*)\n")
FILE = re.compile(r"# ([\w/]+\.py)\n")
NOISE = re.compile(
    r"(?<=largest difference ).*|(?<= sum )(0|\d(\.\d+)?e-1\d)(?= %)|\b\d(\.\d+)?e-(09|1\d)\b"
    r"|(?<=its checksum is )[0-9a-f]{8}, [0-9a-f]{8}"
)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `start` and `end` are where its text lies in the page."""

    language: str
    text: str
    start: int
    end: int

    @property
    def file(self) -> str:
        """The name of the file that a block of Python is; empty for one that runs with the page."""
        found = FILE.match(self.text)
        return found[1] if found and self.language == "python" else ""


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    return [Block(m[1], m[2], m.start(2), m.end(2)) for m in FENCE.finditer(page)]


def with_outputs(page: str, name: str) -> str:
    """The page with each text block replaced by what the block of Python before it prints."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    source, text = f"{Path(name).stem.lower()}.py", ""  # lines are counted as if the blocks were one file
    found: list[Block] = []
    printed = ""
    for block in blocks(page):
        if block.language == "python" and not block.file:
            assert not printed, f"nothing shows what is printed before: {block.text.splitlines()[0]}"
            before, text = "\n" * text.count("\n"), text + block.text + "\n"
            linecache.cache[source] = (len(text), None, text.splitlines(keepends=True), source)
            printed = _run(before + block.text, source, namespace)
        elif block.file:
            Path(block.file).write_text(block.text, "utf-8")
        elif block.language == "console" and (verb := VERB.match(block.text)):
            said = f"$ meshwright {verb[1]}\n{_answer(shlex.split(verb[1]))}"
            found.append(replace(block, text=said))
        elif block.language == "console" and (run := RUN.match(block.text)):
            found.append(replace(block, text=f"$ meshwright {run[1]}\n{_launched(shlex.split(run[1]))}"))
        elif block.language == "text":
            same = NOISE.sub("…", printed) == NOISE.sub("…", block.text)
            found.append(block if same else replace(block, text=printed))
            printed = ""
    assert not printed, f"nothing shows what is printed last: {printed}"
    for block in reversed(found):
        page = page[: block.start] + block.text + page[block.end :]
    return page


def _run(text: str, source: str, namespace: dict[str, object]) -> str:
    from meshwright.errors import MeshwrightError

    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            exec(compile(text, source, "exec"), namespace)
        except MeshwrightError as error:
            print(f"{type(error).__name__}: {error}")
    return "".join(f"{row.rstrip()}\n" for row in out.getvalue().splitlines())


def _answer(arguments: list[str]) -> str:
    """What a verb of the command line prints."""
    from meshwright.cli import app

    os.environ.pop("COLUMNS", None)  # as wide as into a file
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        app(arguments, standalone_mode=False)
    return "".join(f"{row.rstrip()}\n" for row in out.getvalue().splitlines())


def _launched(arguments: list[str]) -> str:
    """What ranks print."""
    command = [sys.executable, "-X", "utf8", "-m", "meshwright.cli", *arguments]
    quiet = os.environ | {"TQDM_DISABLE": "1"}  # bars of other libraries tell times
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=quiet)
    return "".join(f"{row.rstrip()}\n" for row in done.stdout.splitlines())


def main(name: str) -> None:
    """Write the page anew. Files that it makes are made elsewhere, where its imports find them."""
    path = ROOT / name
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        sys.path.insert(0, folder)
        path.write_text(with_outputs(path.read_text("utf-8"), name), "utf-8")


# ---------------------------------------------------------------- the tests

COPY = "import sys; sys.path.insert(0, {folder!r}); import test_docs as t; t.ROOT = t.Path({root!r}); t.main({name!r})"


def pages() -> list[Any]:
    """Each page that shows code. Those that start ranks are slower, and all but the first two are for `test-all`."""
    found = []
    for name in PROSE:
        text = (ROOT / name).read_text("utf-8")
        marks = [] if name in FIRST else [pytest.mark.full]
        if "```console\n$ meshwright run" in text:
            marks.append(pytest.mark.procs)
        if "```python\n" in text:
            found.append(pytest.param(name, marks=marks))
    return found


@pytest.mark.parametrize("name", pages())
@quick(lambda name: name != "docs/tutorial/first-steps.md")
def test_every_block_prints_what_the_page_says(name: str, tmp_path: Path) -> None:
    """In a process of its own, as a reader would run it: pages may give operators rules."""
    page = (ROOT / name).read_text("utf-8")
    copy = tmp_path / name
    copy.parent.mkdir(exist_ok=True, parents=True)
    copy.write_text(page, "utf-8")
    command = COPY.format(folder=str(ROOT / "tests"), root=str(tmp_path), name=name)
    done = subprocess.run(
        [sys.executable, "-X", "utf8", "-c", command],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said, now = (NOISE.sub("…", text).splitlines() for text in (page, copy.read_text("utf-8")))
    assert said == now, "\n".join(difflib.unified_diff(said, now, name, "what it prints", lineterm=""))


@pytest.mark.parametrize("name", PROSE)
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text("utf-8"))
    gone = [t for t in targets if "://" not in t and not (path.parent / t).exists()]
    assert not gone


def test_every_public_name_has_a_reference_entry() -> None:
    """And an entry of a name that is gone is dead, too."""
    import meshwright

    pages = "".join(p.read_text("utf-8") for p in (ROOT / "docs/reference").glob("*.md"))
    entries = sorted(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    assert entries == sorted(f"{module}.{name}" for name, module in meshwright._PUBLIC.items())


def test_the_page_of_the_command_line_is_what_the_commands_say(tmp_path: Path) -> None:
    """`python -m typer meshwright/cli/__init__.py utils docs --name meshwright --output docs/reference/cli.md`."""
    page = tmp_path / "cli.md"
    command = [sys.executable, "-m", "typer", "meshwright/cli/__init__.py", "utils", "docs"]
    command += ["--name", "meshwright", "--output", str(page)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=60)
    assert page.read_text("utf-8") == (ROOT / "docs/reference/cli.md").read_text("utf-8")


def test_every_page_is_in_the_navigation() -> None:
    listed = re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(str(p.relative_to(ROOT / "docs")) for p in ROOT.glob("docs/**/*.md"))


if __name__ == "__main__":
    main(sys.argv[1])
