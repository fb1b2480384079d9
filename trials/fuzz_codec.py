"""Fuzz the record codec: any bytes must give records or a clear error, and both codecs must agree.

    python -m trials.fuzz_codec --seconds 60

An example is a corrupted fetch response. The plain codec and the compiled one read it: they must return the same
records or both reject it with `BatchRejected`. What was read is also converted to Arrow (and validated), written and
read back. A child process does the work with numba's bounds checks, a memory limit and an alarm, so an index out of
bounds, a huge allocation, a hang and a crash are findings too. An example depends only on the seed and its number; a
finding prints how to run it again. The exit code is 1 if there was one.
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
from millstream.protocol.records.encoder import encode_source, source_of
from millstream.protocol.records.partitioner import choose_partitions
from millstream.protocol.records.record import NewRecord, Record, decode_records, encode_batch

CHILD_MARK = "MILLSTREAM_FUZZ_PROGRESS"
ADDRESS_SPACE_BYTES = 6 * 1024**3
# The first example also compiles the kernels, perhaps on a busy machine.
EXAMPLE_SECONDS_MAX = 100
DECOMPRESSED_BYTES_MAX = 8 * 1024 * 1024

# Boundary values of varints, lengths and counts.
EDGE_BYTES = (0x00, 0x01, 0x02, 0x7E, 0x7F, 0x80, 0x81, 0xFE, 0xFF)
EDGE_NUMBERS = (0, 1, 2, 7, 127, 128, 2**15, 2**31 - 1, 2**31, 2**32 - 1)
# Invalid UTF-8: overlong, a surrogate, beyond Unicode, truncated.
INVALID_TEXTS = (
    b"\xc0\x80",
    b"\xe0\x80\x80",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xf0\x80\x80\x80",
    b"\xe2\x82",
    b"\x80",
)
# The positions and sizes of the fields of a batch header.
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
    """The codec violated one of its guarantees."""


def make_records(rng: random.Random) -> list[NewRecord]:
    """Return records that use every feature of a record."""
    base = rng.choice((0, 1_700_000_000_000, -1, 2**62))

    def some_bytes() -> bytes | None:
        size = rng.choice((0, 1, 5, 63, 64, 127, 128, 300))
        return rng.choice((None, b"", b"z" * size, rng.randbytes(size)))

    def some_headers() -> tuple[tuple[str, bytes | None], ...]:
        return tuple((rng.choice(("", "a", "ключ", "k" * 70)), some_bytes()) for _ in range(rng.choice((0, 0, 1, 4))))

    return [
        NewRecord(some_bytes(), some_bytes(), some_headers(), base + rng.choice((0, 1, -1, 10**6, 10**12)))
        for _ in range(rng.choice((1, 1, 2, 9, 40)))
    ]


def make_batch(rng: random.Random) -> bytearray:
    """Return a valid batch of any kind."""
    return encode_batch(
        make_records(rng),
        base_offset=rng.choice((0, 5, 1000, 2**40)),
        compression=rng.randrange(5),
        producer_id=rng.choice((-1, 7)),
        producer_epoch=0,
        base_sequence=rng.choice((-1, 0)),
        timestamp_type=rng.randrange(2),
        transactional=rng.random() < 0.2,
        control=rng.random() < 0.1,
    )


def corrupt_bytes(rng: random.Random, data: bytearray, first: int) -> None:
    """Corrupt some bytes from `first` on."""
    for _ in range(rng.choice((1, 1, 2, 5))):
        if len(data) <= first:
            return
        at = rng.randrange(first, len(data))
        kind = rng.randrange(8)
        if kind == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at] = rng.choice(EDGE_BYTES)
        elif kind == 2:
            data[at : at + 5] = bytes(rng.choice(EDGE_BYTES) for _ in range(5))
        elif kind == 3:
            del data[at : at + rng.choice((1, 2, 20))]
        elif kind == 4:
            data[at:at] = rng.randbytes(rng.choice((1, 2, 20)))
        elif kind == 5:
            junk = rng.choice(INVALID_TEXTS)
            data[at : at + len(junk)] = junk
        elif kind == 6:
            data[at:at] = data[first : first + rng.randrange(64)]
        else:
            del data[at:]


def corrupt_header(rng: random.Random, batch: bytearray) -> None:
    """Put an invalid number into a header field."""
    at, size = rng.choice(HEADER_FIELDS)
    number = rng.choice((rng.choice(EDGE_NUMBERS), rng.getrandbits(8 * size), 2 ** (8 * size) - 1))
    batch[at : at + size] = (number % 2 ** (8 * size)).to_bytes(size, "big")


def corrupt_decompressed_records(rng: random.Random, batch: bytearray) -> None:
    """Decompress the records, corrupt them, and compress them again."""
    if len(batch) < HEADER_BYTES:
        return
    codec = batch[22] & 7
    try:
        plain = bytearray(decompress(codec, batch[HEADER_BYTES:], bytes_max=DECOMPRESSED_BYTES_MAX))
    except BatchRejected:
        return
    corrupt_bytes(rng, plain, 0)
    batch[HEADER_BYTES:] = compress(codec, plain)
    fix_length(batch)


def write_number(rng: random.Random, number: int) -> bytes:
    """Return a zigzag varint, sometimes longer than needed and sometimes longer than allowed."""
    rest = number << 1 if number >= 0 else (-number << 1) - 1
    digits: list[int] = []
    while rest or not digits:
        digits.append(rest & 0x7F)
        rest >>= 7
    digits += [0] * rng.choice((0,) * 30 + (1, 4, 9))
    return bytes(digit | 0x80 for digit in digits[:-1]) + bytes(digits[-1:])


def write_hostile_field(rng: random.Random, least: int) -> bytes:
    """Return a field whose length is usually correct."""
    content = rng.choice((b"", b"abc", b"x" * 130, *INVALID_TEXTS))
    length = len(content)
    if rng.random() < 0.03:
        length = rng.choice((least, -1, -2, length + 1, length - 1, *EDGE_NUMBERS))
    return write_number(rng, length) + (content if length >= 0 else b"")


def write_hostile_record(rng: random.Random, delta: int) -> bytes:
    """Return a record that is usually well framed, with boundary values for its numbers."""
    rarely = rng.random() < 0.05
    timestamp_delta = rng.choice((0, 1, -1, 2**62, -(2**62), 2**63 - 1, -(2**63), 2**64))
    offset_delta = rng.choice((delta, delta, delta - 1, delta + 3, -1, 2**31 - 1, 2**31)) if rarely else delta
    header_count = rng.choice((0, 0, 1, 2, 3))
    body = b"\x00" + write_number(rng, timestamp_delta) + write_number(rng, offset_delta)
    body += write_hostile_field(rng, -1) + write_hostile_field(rng, -1)
    body += write_number(rng, rng.choice((-1, 65_536, 65_537, 2**31)) if rng.random() < 0.02 else header_count)
    for _ in range(header_count):
        body += write_hostile_field(rng, 0) + write_hostile_field(rng, -1)
    return write_number(rng, len(body) + (rng.choice((-1, 1)) if rng.random() < 0.02 else 0)) + body


def make_hostile_batch(rng: random.Random) -> bytearray:
    """Return a batch with correct framing and CRC and hostile records."""
    batch = make_batch(rng)
    count = rng.choice((0, 1, 1, 2, 5))
    section = b"".join(write_hostile_record(rng, delta) for delta in range(count))
    batch[HEADER_BYTES:] = compress(batch[22] & 7, section)
    batch[23:27] = max(0, count - 1 + rng.choice((0, 0, 0, 5, -1))).to_bytes(4, "big")
    batch[57:61] = max(0, count + rng.choice((0,) * 20 + (1, -1))).to_bytes(4, "big")
    if rng.random() < 0.3:
        number = rng.choice((0, 2**62, -(2**62), 2**63 - 1, -(2**63)))
        batch[27:35] = number.to_bytes(8, "big", signed=True)
    fix_length(batch)
    fix_crc(batch)
    return batch


def fix_length(batch: bytearray) -> None:
    batch[8:12] = (len(batch) - LOG_OVERHEAD_BYTES).to_bytes(4, "big", signed=True)


def fix_crc(batch: bytearray) -> None:
    """Correct the CRC of the batch, so that later checks are reached."""
    batch[17:21] = crc32c(bytes(batch[21:])).to_bytes(4, "big")


def make_corrupt_batch(rng: random.Random) -> bytearray:
    """Return a corrupt batch, usually with a correct length and CRC."""
    batch = make_batch(rng)
    for _ in range(rng.choice((0, 1, 1, 2))):
        kind = rng.randrange(4)
        if kind == 0:
            corrupt_header(rng, batch)
        elif kind == 1:
            corrupt_decompressed_records(rng, batch)
        else:
            corrupt_bytes(rng, batch, rng.choice((0, HEADER_BYTES, HEADER_BYTES)))
        if len(batch) >= HEADER_BYTES and rng.random() < 0.8:
            fix_length(batch)
    if len(batch) >= HEADER_BYTES and rng.random() < 0.9:
        fix_crc(batch)
    return batch


def make_response(rng: random.Random) -> bytes:
    """Return a fetch response: usually corrupt batches, sometimes only noise, sometimes truncated."""
    if rng.random() < 0.05:
        return rng.randbytes(rng.choice((0, 1, 60, 61, 62, 500)))
    response = bytearray()
    makers = (make_corrupt_batch,) * 5 + (make_hostile_batch,) * 4 + (make_batch,)
    for _ in range(rng.choice((1, 1, 1, 3))):
        response += rng.choice(makers)(rng)
    if rng.random() < 0.1:
        del response[rng.randrange(len(response) + 1) :]
    return bytes(response)


def as_records(part: Columns) -> list[Record]:
    """Return the rows of some columns, as the plain codec returns them."""
    if part.keys is None or part.values is None or part.headers is None:
        raise Finding("a requested column is missing")
    fields = (part.keys.to_list(), part.values.to_list(), part.headers.to_list())
    return [Record(*row) for row in zip(part.offsets.tolist(), part.timestamps_ms.tolist(), *fields, strict=True)]


def records_or_none(read: Callable[[], list[Record]]) -> list[Record] | None:
    """Return what was read, or None if it was rejected; any other error is a finding and propagates."""
    try:
        return read()
    except BatchRejected as error:
        if not str(error):
            raise Finding("an error without a message") from error
        return None


def check_example(rng: random.Random) -> bool:
    """Run one example; raise for a finding. Return whether its bytes were read, not rejected."""
    response = make_response(rng)
    control = rng.random() < 0.5
    start = rng.choice((0, 0, 0, 3, 2**40))
    end = rng.choice((2**63 - 1, 2**63 - 1, 7))
    parts: list[Columns] = []

    def read_plain() -> list[Record]:
        records = decode_records(response, control=control, decompressed_bytes_max=DECOMPRESSED_BYTES_MAX)
        return [record for record in records if start <= record.offset < end]

    def read_compiled() -> list[Record]:
        parts[:] = decode_columns(
            response,
            control=control,
            start_offset=start,
            end_offset=end,
            decompressed_bytes_max=DECOMPRESSED_BYTES_MAX,
            rows_max=rng.choice((1, 3, 8192)),
        )
        return [record for part in parts for record in as_records(part)]

    plain, compiled = records_or_none(read_plain), records_or_none(read_compiled)
    if plain is not None and compiled != plain:
        raise Finding(f"the plain codec reads {plain!r}, the compiled one {compiled!r}")
    if plain is None and compiled is not None and not skips_corrupt_batch(response, control, start, end):
        raise Finding("the plain codec rejects what the compiled one reads")
    for part in parts if compiled else ():
        check_columns(part)
    return compiled is not None


def skips_corrupt_batch(response: bytes, control: bool, start: int, end: int) -> bool:
    """Whether some batch is outside the requested offsets: the compiled codec does not read those."""
    try:
        headers = list(iterate_whole_headers(response))
    except BatchRejected:
        return False
    return any(
        (header.is_control and not control) or header.last_offset < start or header.base_offset >= end
        for header in headers
    )


def check_columns(part: Columns) -> None:
    """Convert the columns to Arrow, write them and read them back."""
    to_arrow(part, topic="fuzz", partition=0, names=NAMES).validate(full=True)
    if part.keys is not None:
        choose_partitions(part.keys, 5)
    records = decode_records(b"".join(encode_source(source_of(part), batch_bytes_max=200)))
    # Offsets count from 0 in every batch.
    if [record[1:] for record in records] != [record[1:] for record in as_records(part)]:
        raise Finding("columns were written as different records")


def check_bounds_check() -> None:
    """Verify that an index out of bounds would be detected."""

    @njit(cache=False)
    def read_behind(data: npt.NDArray[np.uint8]) -> int:
        return int(data[data.size])

    try:
        read_behind(np.empty(1, np.uint8))
    except IndexError:
        return
    raise SystemExit("numba's bounds check is off")


def run_child(progress: Path, seed: str, first: int, examples: int, seconds: float) -> int:
    """Run examples until one is a finding or the time is up."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    check_bounds_check()
    started = time.monotonic()
    read = 0
    with progress.open("r+b", buffering=0) as progress_file:
        for number in range(first, first + examples):
            if time.monotonic() - started > seconds:
                examples = number - first
                break
            os.pwrite(progress_file.fileno(), number.to_bytes(8, "big"), 0)
            signal.alarm(EXAMPLE_SECONDS_MAX)
            try:
                read += check_example(random.Random(f"{seed}/{number}"))
            except Exception:
                traceback.print_exc()
                return 1
            finally:
                signal.alarm(0)
            if number == first:
                # Only after compilation, which takes more memory than any example may.
                resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE_BYTES, ADDRESS_SPACE_BYTES))
    print(f"{examples} examples, {read} of them readable, none of them a finding (seed {seed})")
    return 0


def run(arguments: Sequence[str]) -> int:
    """Start the child with bounds checks, and print how to run a finding again."""
    with tempfile.TemporaryDirectory() as folder:
        progress = Path(folder) / "progress"
        progress.write_bytes(bytes(8))
        # numba's cache does not distinguish code with and without bounds checks, so this code gets its own folder. It
        # is kept, because compilation takes longer than a thousand examples.
        kept_folder = Path(__file__).parent / "__pycache__" / "with-bounds-check"
        environment = dict(os.environ, NUMBA_BOUNDSCHECK="1", NUMBA_CACHE_DIR=str(kept_folder))
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
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="trials.fuzz_codec", description="Fuzz the record codec.")
    parser.add_argument("--seconds", type=float, default=60.0, help="the maximum duration (default: 60)")
    parser.add_argument("--examples", type=int, default=2**62, help="the maximum number of examples")
    parser.add_argument("--seed", default="millstream", help="any text; the same text produces the same examples")
    parser.add_argument("--first", type=int, default=0, help="the number of the first example")
    return parser.parse_args(arguments)


def main() -> int:
    """Run as the child if the environment says so, otherwise as the parent."""
    arguments = sys.argv[1:]
    if CHILD_MARK not in os.environ:
        return run(arguments)
    options = parse(arguments)
    return run_child(Path(os.environ[CHILD_MARK]), options.seed, options.first, options.examples, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
