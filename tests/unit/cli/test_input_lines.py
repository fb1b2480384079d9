from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from millstream.cli import publish
from millstream.cli.exit_code import CommandFailed
from millstream.cli.publish import read_line_groups


async def read_all(descriptor: int) -> list[bytes]:
    return [line async for group in read_line_groups(descriptor) for line in group.lines]


def opened(path: Path, content: bytes) -> int:
    path.write_bytes(content)
    return os.open(path, os.O_RDONLY)


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\n\nb", [b"a", b"", b"b"]),
        (b"\n", [b""]),
        (b"a\r\nb\r\n", [b"a\r", b"b\r"]),
        (b"\xff\x00\n", [b"\xff\x00"]),
    ],
)
async def test_a_file_is_read_line_by_line(tmp_path: Path, content: bytes, lines: list[bytes]) -> None:
    descriptor = opened(tmp_path / "input", content)
    assert await read_all(descriptor) == lines
    os.close(descriptor)


async def test_a_line_across_chunks_stays_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "CHUNK_BYTES", 3)
    descriptor = opened(tmp_path / "input", b"first\nsecond line\nx")
    assert await read_all(descriptor) == [b"first", b"second line", b"x"]
    os.close(descriptor)


async def test_the_size_of_the_groups_adds_up_to_the_size_of_the_file(tmp_path: Path) -> None:
    descriptor = opened(tmp_path / "input", b"one\ntwo\nthree")
    assert sum([group.size_bytes async for group in read_line_groups(descriptor)]) == 13
    os.close(descriptor)


async def test_a_pipe_yields_each_line_as_it_arrives() -> None:
    read_end, write_end = os.pipe()
    groups = read_line_groups(read_end)
    os.write(write_end, b"first\nsec")
    assert (await anext(groups)).lines == [b"first"]
    waiting = asyncio.ensure_future(anext(groups))
    await asyncio.sleep(0)
    assert not waiting.done()
    os.write(write_end, b"ond\n")
    assert (await waiting).lines == [b"second"]
    os.close(write_end)
    assert [group async for group in groups] == []
    os.close(read_end)


async def test_input_that_cannot_be_polled_is_read_at_once() -> None:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    assert await read_all(descriptor) == []
    os.close(descriptor)


async def test_an_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "LINE_BYTES_MAX", 10)
    descriptor = opened(tmp_path / "input", b"one\ntwo\n" + b"x" * 11)
    with pytest.raises(CommandFailed, match="line 3 of the input is longer than 10 bytes"):
        await read_all(descriptor)
    os.close(descriptor)
