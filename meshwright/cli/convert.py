"""`meshwright convert`: a checkpoint from one format to another."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.common import JsonOption
from meshwright.errors import CheckpointError

FORMATS = {"sharded": "sharded", "file": "file", "hf": "hugging face"}
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def convert(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="The checkpoint, file or folder to read.", show_default=False),
    ],
    target: Annotated[
        Path,
        typer.Argument(metavar="TARGET", help="The path to write; it must not exist.", show_default=False),
    ],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="sharded, file or hf. By default file for *.safetensors, hf for a sharded source, else sharded.",
        ),
    ] = "",
    config: Annotated[
        Path | None, typer.Option(help="config.json of a Hugging Face model; without it that in SOURCE.")
    ] = None,
    file_size: Annotated[
        str, typer.Option(metavar="SIZE", help="How large a file of a Hugging Face model becomes.")
    ] = "5GB",
    as_json: JsonOption = False,
) -> None:
    """Convert between a folder of step.save, one safetensors file, and the folder of a Hugging Face model.

    It converts one tensor at a time, so memory for the largest is enough. It needs no GPU and no ranks.
    """
    from meshwright.checkpoint.convert import convert as run
    from meshwright.cli.common import out
    from meshwright.redistribute.steps import show_bytes

    if to and to not in FORMATS:
        raise CheckpointError(f"--to is {to!r}", why="formats: " + ", ".join(FORMATS))
    if config is not None and not config.is_file():
        raise CheckpointError(f"there is no file {str(config)!r}", hint="--config config.json")
    found = run(source, target, to=FORMATS.get(to, ""), config=config, file_bytes=size_of(file_size))
    if as_json:
        print(json.dumps(asdict(found), ensure_ascii=False, indent=2))
        return
    first, *more = found.files
    files = f"{len(found.files)} files" if more else first
    out().print(
        f"{found.source} → {found.target}: {found.tensors} tensors, {show_bytes(found.size_bytes)}, {files}",
        soft_wrap=True,
    )
    if found.left_out:
        out().print(f"not in it: {'; '.join(found.left_out)}", soft_wrap=True)


def size_of(text: str) -> int:
    """``5GB`` → bytes."""
    number, unit = text.strip().upper(), "B"
    for name in sorted(UNITS, key=len, reverse=True):
        if number.endswith(name):
            number, unit = number[: -len(name)].strip(), name
            break
    try:
        size = float(number) * UNITS[unit]
    except ValueError:
        size = 0.0
    if not 1 <= size < 2**63:
        raise CheckpointError(
            f"--file-size is {text!r}", why="a number of bytes is expected", hint="--file-size 5GB"
        )
    return int(size)
