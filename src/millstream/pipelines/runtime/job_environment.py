"""The packages of jobs: requirements are resolved once to a lock of wheels with hashes, which every node installs.

There is one folder for each lock, named by its hash. Millstream's own dependencies keep the versions that the node has:
a job shares them, and the resolver refuses other versions.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Final

from millstream.core.errors import InvalidSetting, MillstreamError
from millstream.core.requirements import check_requirements
from millstream.core.scratch import temporary_folder_async

RESOLVE_S: Final = 600.0
KEPT: Final = 10
"""How many folders that no job needs any more are kept."""
_OUTPUT_MAX: Final = 2000
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_COMPLETE: Final = ".complete"
_LOCK: Final = "lock.txt"


class PackagesFailed(MillstreamError):
    """Packages could not be fetched now; the index may be unavailable."""


async def resolve(requirements: str) -> str:
    """Resolve requirements to a lock: every package with its version and the hash of its wheel."""
    lines = check_requirements(requirements)
    options = [line for line in lines if line.startswith("-")]
    have = _installed()
    async with temporary_folder_async() as scratch:
        given, fixed, report = (Path(scratch, name) for name in ("requirements.txt", "constraints.txt", "report.json"))
        given.write_text("\n".join(lines) + "\n", encoding="utf-8")
        fixed.write_text("".join(f"{name}=={number}\n" for name, number in sorted(have.items())), encoding="utf-8")
        more = ["--dry-run", "--ignore-installed", "--report", str(report), "-c", str(fixed), "-r", str(given)]
        await _pip(["install", *more])
        document = json.loads(report.read_text(encoding="utf-8"))["install"]
    locked = []
    for package in document:
        name, number = package["metadata"]["name"], package["metadata"]["version"]
        if have.get(_normalize_name(name)) == number:
            continue
        digest = package["download_info"]["archive_info"]["hashes"]["sha256"]
        locked.append(f"{_normalize_name(name)}=={number} --hash=sha256:{digest}")
    return "\n".join([*options, *sorted(locked)]) + "\n"


async def install(lock: str, root: Path, *, needed: Collection[str] = ()) -> str:
    """Return the folder with the packages of a lock, installing them first if need be; empty if there are none.

    `needed` are the locks whose folders are kept in any case.
    """
    if not any(line and not line.startswith("-") for line in lock.splitlines()):
        return ""
    folder = root / folder_of(lock)
    if not await asyncio.to_thread((folder / _COMPLETE).exists):
        scratch = await asyncio.to_thread(_make_scratch, root, lock)
        try:
            target = scratch / "packages"
            arguments = ["--target", str(target), "-r", str(scratch / _LOCK)]
            await _pip(["install", "--no-deps", "--require-hashes", *arguments])
            await asyncio.to_thread(_move_into_place, target, folder)
        finally:
            await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
    await asyncio.to_thread(_discard_unused, root, folder, {folder.name, *map(folder_of, needed)})
    return str(folder)


def _make_scratch(root: Path, lock: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    (scratch / _LOCK).write_text(lock, encoding="utf-8")
    return scratch


def _move_into_place(target: Path, folder: Path) -> None:
    """Move a complete folder to its final path, unless another run has just done so."""
    (target / _COMPLETE).touch()
    if not (folder / _COMPLETE).exists():
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(target, folder)


def folder_of(lock: str) -> str:
    """Return the name of a lock's folder: its hash, with the Python that it is for."""
    python = f"{sys.implementation.cache_tag}"
    return f"{python}-{sha256(lock.encode()).hexdigest()[:20]}"


def _discard_unused(root: Path, used: Path, needed: Collection[str]) -> None:
    os.utime(used)
    unused = [
        path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".") and path.name not in needed
    ]
    unused.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for old in unused[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


def _installed() -> dict[str, str]:
    """Return Millstream's own dependencies by name: a job shares their versions."""
    versions: dict[str, str] = {}
    waiting = ["millstream", "pyspark", "pyarrow", "pandas", "deltalake"]
    while waiting:
        name = _normalize_name(waiting.pop())
        if name in versions:
            continue
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
            for line in requires(name) or ():
                needed = _NAME.match(line)
                if needed is not None and "extra ==" not in line:
                    waiting.append(needed[0])
    versions.pop("millstream", None)
    return versions


def _normalize_name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


async def _pip(arguments: Sequence[str]) -> None:
    shared = ["--no-input", "--progress-bar", "off", "--disable-pip-version-check", "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", arguments[0], *shared, *arguments[1:]]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(RESOLVE_S):
            output, _ = await process.communicate()
    except TimeoutError:
        raise PackagesFailed(f"pip did not end within {RESOLVE_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        whole = output.decode(errors="replace")
        conflict = _find_conflict(whole)
        if conflict:
            raise InvalidSetting(conflict)
        # What pip has done before it failed is of no use.
        text = whole[max(whole.find("ERROR:"), 0) :].strip()[-_OUTPUT_MAX:]
        if "No module named pip" in text:
            raise InvalidSetting(f"the packages of a job are installed by pip, which {sys.executable} does not have")
        if re.search(r"NewConnectionError|ConnectTimeout|ReadTimeout|Temporary failure|Connection refused", text):
            raise PackagesFailed(f"pip does not reach its index: {text}")
        raise InvalidSetting(f"the requirements cannot be met by wheels: {text}")


_CONFLICT: Final = re.compile(r"The conflict is caused by:\n((?: +\S.*\n)+)")
_CONSTRAINED: Final = "The user requested (constraint) "
_REQUESTED: Final = "The user requested "


def _find_conflict(output: str) -> str:
    """Return, as a sentence, which requirements conflict according to pip; empty if none do."""
    match = _CONFLICT.search(output)
    if match is None:
        return ""
    lines = [line.strip() for line in match[1].splitlines()]
    fixed = [line.removeprefix(_CONSTRAINED) for line in lines if line.startswith(_CONSTRAINED)]
    named = [
        f"requirements name {line.removeprefix(_REQUESTED)}" if line.startswith(_REQUESTED) else line
        for line in lines
        if not line.startswith(_CONSTRAINED)
    ]
    if fixed:
        named.append(f"Millstream on this node uses {', '.join(fixed)}, which jobs share")
    return f"the requirements conflict: {', and '.join(named)}"
