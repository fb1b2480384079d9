"""Fuzz the record codec: any bytes must give records or a clear error, and both codecs must agree.

    python -m trials.fuzz_codec --seconds 60

An example is a fetch response that was broken on purpose. The plain codec and the compiled one read it: they must find
the same records or both refuse it with `BatchRejected`. What was read is also shown as Arrow (and validated), written
again and read back. The work is done in a child process with numba's bounds check on, a limit on its memory and an
alarm, so an index that is out of bounds, a huge allocation, a hang and a crash of the process are findings too. An
example follows from the seed and its number alone: a finding says how to run it again. The exit code is 1 if there
was one.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from crc32c import crc32c
from numba import njit

from millstream.core.errors import BatchRejected
from millstream.protocol.records.arrow import NAMES, to_arrow
from millstream.protocol.records.batch import HEADER_BYTES, LOG_OVERHEAD_BYTES, iterate_whole_headers
from millstream.protocol.records.columns import Columns
from millstream.protocol.records.compression import compress, decompress
from millstream.protocol.records.decoder import decode_columns
from millstream.protocol.records.encoder import encode_columns
from millstream.protocol.records.partitioner import choose_partitions
from millstream.protocol.records.record import NewRecord, Record, decode_records, encode_batch

CHILD_MARK = "MILLSTREAM_FUZZ_PROGRESS"
ADDRESS_SPACE_BYTES = 6 * 1024**3
# The first example also waits for the kernels to be compiled, on a machine that may be busy.
EXAMPLE_SECONDS_MAX = 100
DECOMPRESSED_BYTES_MAX = 8 * 1024 * 1024

# Numbers at the edges of what a varint, a length or a count can hold.
EDGE_BYTES = (0x00, 0x01, 0x02, 0x7E, 0x7F, 0x80, 0x81, 0xFE, 0xFF)
EDGE_NUMBERS = (0, 1, 2, 7, 127, 128, 2**15, 2**31 - 1, 2**31, 2**32 - 1)
# Bytes that are not UTF-8: overlong, a surrogate, beyond Unicode, cut off.
NO_TEXTS = (
    b"\xc0\x80",
    b"\xe0\x80\x80",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xf0\x80\x80\x80",
    b"\xe2\x82",
    b"\x80",
)
# Where the fields of a batch header lie, and their sizes.
HEADER_FIELDS = (
    (0, 8),
    (8, 4),
    (12, 4),
    (16, 1),
    (21, 2),
    (23, 4),
    (27, 8),
    (35, 8),
    (43, 8),
    (51, 2),
    (53, 4),
    (57, 4),
)


class Finding(Exception):
    """The codec did something that it must never do."""


def make_records(chance: random.Random) -> list[NewRecord]:
    """Some records with everything a record can have."""
    base = chance.choice((0, 1_700_000_000_000, -1, 2**62))

    def some_bytes() -> bytes | None:
        size = chance.choice((0, 1, 5, 63, 64, 127, 128, 300))
        return chance.choice((None, b"", b"z" * size, chance.randbytes(size)))

    def some_headers() -> tuple[tuple[str, bytes | None], ...]:
        return tuple(
            (chance.choice(("", "a", "ключ", "k" * 70)), some_bytes()) for _ in range(chance.choice((0, 0, 1, 4)))
        )

    return [
        NewRecord(some_bytes(), some_bytes(), some_headers(), base + chance.choice((0, 1, -1, 10**6, 10**12)))
        for _ in range(chance.choice((1, 1, 2, 9, 40)))
    ]


def make_batch(chance: random.Random) -> bytearray:
    """A valid batch of any kind."""
    return encode_batch(
        make_records(chance),
        base_offset=chance.choice((0, 5, 1000, 2**40)),
        compression=chance.randrange(5),
        producer_id=chance.choice((-1, 7)),
        producer_epoch=0,
        base_sequence=chance.choice((-1, 0)),
        timestamp_type=chance.randrange(2),
        transactional=chance.random() < 0.2,
        control=chance.random() < 0.1,
    )


def break_bytes(chance: random.Random, data: bytearray, first: int) -> None:
    """Change some bytes from `first` on, in one of the ways in which bytes go wrong."""
    for _ in range(chance.choice((1, 1, 2, 5))):
        if len(data) <= first:
            return
        at = chance.randrange(first, len(data))
        way = chance.randrange(8)
        if way == 0:
            data[at] ^= 1 << chance.randrange(8)
        elif way == 1:
            data[at] = chance.choice(EDGE_BYTES)
        elif way == 2:
            data[at : at + 5] = bytes(chance.choice(EDGE_BYTES) for _ in range(5))
        elif way == 3:
            del data[at : at + chance.choice((1, 2, 20))]
        elif way == 4:
            data[at:at] = chance.randbytes(chance.choice((1, 2, 20)))
        elif way == 5:
            junk = chance.choice(NO_TEXTS)
            data[at : at + len(junk)] = junk
        elif way == 6:
            data[at:at] = data[first : first + chance.randrange(64)]
        else:
            del data[at:]


def break_header(chance: random.Random, batch: bytearray) -> None:
    """Put a number into a field of the header that does not belong there."""
    at, size = chance.choice(HEADER_FIELDS)
    number = chance.choice((chance.choice(EDGE_NUMBERS), chance.getrandbits(8 * size), 2 ** (8 * size) - 1))
    batch[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "big")


def break_plain_records(chance: random.Random, batch: bytearray) -> None:
    """Break the records behind their compression, and compress them again."""
    if len(batch) < HEADER_BYTES:
        return
    codec = batch[22] & 7
    try:
        plain = bytearray(decompress(codec, batch[HEADER_BYTES:], bytes_max=DECOMPRESSED_BYTES_MAX))
    except BatchRejected:
        return
    break_bytes(chance, plain, 0)
    batch[HEADER_BYTES:] = compress(codec, plain)
    renew_length(batch)


def write_number(chance: random.Random, number: int) -> bytes:
    """A zigzag varint, at times longer than it needs to be, at times longer than it may be."""
    rest = number << 1 if number >= 0 else (-number << 1) - 1
    digits: list[int] = []
    while rest or not digits:
        digits.append(rest & 0x7F)
        rest >>= 7
    digits += [0] * chance.choice((0,) * 30 + (1, 4, 9))
    return bytes(digit | 0x80 for digit in digits[:-1]) + bytes(digits[-1:])


def write_hostile_field(chance: random.Random, least: int) -> bytes:
    """A field whose length is mostly true."""
    content = chance.choice((b"", b"abc", b"x" * 130, *NO_TEXTS))
    length = len(content)
    if chance.random() < 0.03:
        length = chance.choice((least, -1, -2, length + 1, length - 1, *EDGE_NUMBERS))
    return write_number(chance, length) + (content if length >= 0 else b"")


def write_hostile_record(chance: random.Random, delta: int) -> bytes:
    """A record that is well framed, mostly, while its numbers lie at the edges of what they may be."""
    rarely = chance.random() < 0.05
    timestamp_delta = chance.choice((0, 1, -1, 2**62, -(2**62), 2**63 - 1, -(2**63), 2**64))
    offset_delta = chance.choice((delta, delta, delta - 1, delta + 3, -1, 2**31 - 1, 2**31)) if rarely else delta
    header_count = chance.choice((0, 0, 1, 2, 3))
    body = b"\x00" + write_number(chance, timestamp_delta) + write_number(chance, offset_delta)
    body += write_hostile_field(chance, -1) + write_hostile_field(chance, -1)
    body += write_number(chance, chance.choice((-1, 65_536, 65_537, 2**31)) if chance.random() < 0.02 else header_count)
    for _ in range(header_count):
        body += write_hostile_field(chance, 0) + write_hostile_field(chance, -1)
    return write_number(chance, len(body) + (chance.choice((-1, 1)) if chance.random() < 0.02 else 0)) + body


def make_hostile_batch(chance: random.Random) -> bytearray:
    """A batch whose framing and CRC are right and whose records are written to mislead."""
    batch = make_batch(chance)
    count = chance.choice((0, 1, 1, 2, 5))
    section = b"".join(write_hostile_record(chance, delta) for delta in range(count))
    batch[HEADER_BYTES:] = compress(batch[22] & 7, section)
    batch[23:27] = max(0, count - 1 + chance.choice((0, 0, 0, 5, -1))).to_bytes(4, "big")
    batch[57:61] = max(0, count + chance.choice((0,) * 20 + (1, -1))).to_bytes(4, "big")
    if chance.random() < 0.3:
        number = chance.choice((0, 2**62, -(2**62), 2**63 - 1, -(2**63)))
        batch[27:35] = number.to_bytes(8, "big", signed=True)
    renew_length(batch)
    renew_crc(batch)
    return batch


def renew_length(batch: bytearray) -> None:
    """Make the length of the batch true."""
    batch[8:12] = (len(batch) - LOG_OVERHEAD_BYTES).to_bytes(4, "big", signed=True)


def renew_crc(batch: bytearray) -> None:
    """Make the CRC of the batch true, so that the checks behind it are reached."""
    batch[17:21] = crc32c(bytes(batch[21:])).to_bytes(4, "big")


def make_broken_batch(chance: random.Random) -> bytearray:
    """A batch that was broken, mostly in a way that its length and CRC do not give away."""
    batch = make_batch(chance)
    for _ in range(chance.choice((0, 1, 1, 2))):
        way = chance.randrange(4)
        if way == 0:
            break_header(chance, batch)
        elif way == 1:
            break_plain_records(chance, batch)
        else:
            break_bytes(chance, batch, chance.choice((0, HEADER_BYTES, HEADER_BYTES)))
        if len(batch) >= HEADER_BYTES and chance.random() < 0.8:
            renew_length(batch)
    if len(batch) >= HEADER_BYTES and chance.random() < 0.9:
        renew_crc(batch)
    return batch


def make_response(chance: random.Random) -> bytes:
    """A fetch response: mostly broken batches, at times only noise, at times cut off."""
    if chance.random() < 0.05:
        return chance.randbytes(chance.choice((0, 1, 60, 61, 62, 500)))
    response = bytearray()
    makers = (make_broken_batch,) * 5 + (make_hostile_batch,) * 4 + (make_batch,)
    for _ in range(chance.choice((1, 1, 1, 3))):
        response += chance.choice(makers)(chance)
    if chance.random() < 0.1:
        del response[chance.randrange(len(response) + 1) :]
    return bytes(response)


def as_records(part: Columns) -> list[Record]:
    """The rows of some columns, as the plain codec gives them."""
    if part.keys is None or part.values is None or part.headers is None:
        raise Finding("a column that was asked for is missing")
    fields = (part.keys.to_list(), part.values.to_list(), part.headers.to_list())
    return [Record(*row) for row in zip(part.offsets.tolist(), part.timestamps_ms.tolist(), *fields, strict=True)]


def records_or_refusal(read: Callable[[], list[Record]]) -> list[Record] | None:
    """What was read, or None if it was refused; any other error is a finding and passes through."""
    try:
        return read()
    except BatchRejected as error:
        if not str(error):
            raise Finding("an error without a text") from error
        return None


def check_example(chance: random.Random) -> bool:
    """Run one example; raise for a finding. Returns whether its bytes were read, not refused."""
    response = make_response(chance)
    control = chance.random() < 0.5
    start = chance.choice((0, 0, 0, 3, 2**40))
    end = chance.choice((2**63 - 1, 2**63 - 1, 7))
    parts: list[Columns] = []

    def read_plain() -> list[Record]:
        found = decode_records(response, control=control, decompressed_bytes_max=DECOMPRESSED_BYTES_MAX)
        return [record for record in found if start <= record.offset < end]

    def read_compiled() -> list[Record]:
        parts[:] = decode_columns(
            response,
            control=control,
            start_offset=start,
            end_offset=end,
            decompressed_bytes_max=DECOMPRESSED_BYTES_MAX,
            rows_max=chance.choice((1, 3, 8192)),
        )
        return [record for part in parts for record in as_records(part)]

    plain, compiled = records_or_refusal(read_plain), records_or_refusal(read_compiled)
    if plain is not None and compiled != plain:
        raise Finding(f"the plain codec reads {plain!r}, the compiled one {compiled!r}")
    if plain is None and compiled is not None and not skips_the_fault(response, control, start, end):
        raise Finding("the plain codec refuses what the compiled one reads")
    for part in parts if compiled else ():
        check_columns(part)
    return compiled is not None


def skips_the_fault(response: bytes, control: bool, start: int, end: int) -> bool:
    """Whether some batch lies outside of the offsets asked for: the compiled codec does not look into those."""
    try:
        headers = list(iterate_whole_headers(response))
    except BatchRejected:
        return False
    return any(
        (header.is_control and not control) or header.last_offset < start or header.base_offset >= end
        for header in headers
    )


def check_columns(part: Columns) -> None:
    """Show the columns as Arrow, write them again and read them back."""
    to_arrow(part, topic="fuzz", partition=0, names=NAMES).validate(full=True)
    if part.keys is not None:
        choose_partitions(part.keys, 5)
    increasing = bool(np.all(part.offsets[1:] > part.offsets[:-1]))
    written = b"".join(encode_columns(part, keep_offsets=increasing, batch_bytes_max=200))
    found = list(decode_records(written))
    if [record[not increasing :] for record in found] != [record[not increasing :] for record in as_records(part)]:
        raise Finding("columns were written as other records than they hold")


def check_bounds_check() -> None:
    """Make sure that an index out of bounds would be seen at all."""

    @njit(cache=False)
    def read_behind(data: npt.NDArray[np.uint8]) -> int:
        return int(data[data.size])

    try:
        read_behind(np.empty(1, np.uint8))
    except IndexError:
        return
    raise SystemExit("numba's bounds check is off")


def run_child(progress: Path, seed: str, first: int, examples: int, seconds: float) -> int:
    """Run examples until one is a finding or the time is over."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    check_bounds_check()
    started = time.monotonic()
    read = 0
    with progress.open("r+b", buffering=0) as note:
        for number in range(first, first + examples):
            if time.monotonic() - started > seconds:
                examples = number - first
                break
            os.pwrite(note.fileno(), number.to_bytes(8, "big"), 0)
            signal.alarm(EXAMPLE_SECONDS_MAX)
            try:
                read += check_example(random.Random(f"{seed}/{number}"))
            except Exception:
                traceback.print_exc()
                return 1
            finally:
                signal.alarm(0)
            if number == first:
                # Only now, with everything compiled: compilation takes more memory than any example may.
                resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    print(f"{examples} examples, {read} of them readable, none of them a finding (seed {seed})")
    return 0


def run(arguments: Sequence[str]) -> int:
    """Start the child with the bounds check on, and say how to run a finding again."""
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "progress"
        progress.write_bytes(bytes(8))
        # The cache of numba does not know code with bounds checks from code without: it gets its own folder, which is
        # kept, since compiling takes longer than a thousand examples.
        kept = Path(__file__).parent / "__pycache__" / "with-bounds-check"
        environment = dict(os.environ, NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(kept))
        environment[CHILD_MARK] = str(progress)
        code = subprocess.run([sys.executable, "-m", "trials.fuzz_codec", *arguments], env=environment).returncode
        number = int.from_bytes(progress.read_bytes(), "big")
    if code == 0:
        return 0
    seed = parse(arguments).seed
    print(f"FINDING in example {number} (the process ended with {code}). To run it again:", file=sys.stderr)
    print(f"    python -m trials.fuzz_codec --seed {seed} --first {number} --examples 1", file=sys.stderr)
    return 1


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="trials.fuzz_codec", description="Fuzz the record codec.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, at most (default: 60)")
    parser.add_argument("--examples", type=int, default=2**62, help="how many, at most")
    parser.add_argument("--seed", default="millstream", help="any text; the same text gives the same examples")
    parser.add_argument("--first", type=int, default=0, help="the number of the first example")
    return parser.parse_args(arguments)


def main() -> int:
    """Run as the child if the parent says so, else as the parent."""
    arguments = sys.argv[1:]
    if CHILD_MARK not in os.environ:
        return run(arguments)
    given = parse(arguments)
    return run_child(Path(os.environ[CHILD_MARK]), given.seed, given.first, given.examples, given.seconds)


if __name__ == "__main__":
    sys.exit(main())
