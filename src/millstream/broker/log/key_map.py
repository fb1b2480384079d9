"""The last offset of each key, for compaction: bounded, and without the keys themselves.

A key of 16 bytes or more is represented by its 128-bit BLAKE2b digest, so memory does not depend on key length; a
shorter key represents itself and cannot be mistaken for a digest. A key takes about 170 bytes.
"""

from __future__ import annotations

from hashlib import blake2b

KEYS_MAX = 1_000_000
DIGEST_BYTES = 16


class KeyMap:
    """Keys and their last offsets."""

    __slots__ = ("_keys_max", "_offsets")

    def __init__(self, keys_max: int = KEYS_MAX) -> None:
        self._offsets: dict[bytes, int] = {}
        self._keys_max = keys_max

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def full(self) -> bool:
        """Return whether it holds the maximum number of keys; the batch that filled it is still added as a whole."""
        return len(self._offsets) >= self._keys_max

    def note(self, key: bytes, offset: int) -> None:
        """Record a record of this key, which comes after all earlier ones."""
        self._offsets[_name(key)] = offset

    def is_superseded(self, key: bytes, offset: int) -> bool:
        """Whether a later record of the same key is known."""
        last = self._offsets.get(_name(key))
        return last is not None and offset < last


def _name(key: bytes) -> bytes:
    return key if len(key) < DIGEST_BYTES else blake2b(key, digest_size=DIGEST_BYTES).digest()
