"""Filters of subscriptions: SQL conditions on messages, compiled once and evaluated on whole batches.

    wanted = compile_filter("payload.total > 1000 AND headers['region'] = 'eu'")
    wanted.matches(batch)

docs/filters.md has the language.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING

from millstream.protocol.filter.batch import DecodedBatch
from millstream.protocol.filter.code import Program
from millstream.protocol.filter.node import Uses, canonical_text

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

VERSION_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Filter:
    """A compiled filter. Two filters are equal if their canonical text is."""

    text: str = field(compare=False)
    """As written."""
    canonical: str
    """The canonical text, which differs only if the meaning may."""
    uses: Uses = field(compare=False)
    _program: Program = field(compare=False, repr=False)

    @property
    def version(self) -> str:
        """Identify the filter in the ledger: a digest of the canonical text."""
        return sha256(self.canonical.encode()).hexdigest()[:VERSION_LENGTH]

    def matches(self, batch: DecodedBatch) -> npt.NDArray[np.bool_]:
        """Return for every message whether the condition is TRUE; FALSE and NULL both exclude it."""
        import numpy as np

        program = self._program
        of_batch = [batch.of_batch(source) for source in program.of_batch]
        if not program.columns:
            return np.full(len(batch), program.run(*of_batch), np.bool_)
        return np.array(program.run(*(batch.column(source) for source in program.columns), *of_batch), np.bool_)


def compile_filter(text: str, *, bare_fields: bool = False) -> Filter:
    """Compile a filter; raise `FilterError`, which points at the location, for what the language does not have.

    It takes half a millisecond for an ordinary filter, a tenth of a second for the worst, and more for the first one of
    a process, which loads the parser and the evaluation. An event loop that must not stall compiles in a thread. With
    `bare_fields`, payload fields need no `payload.` before them.
    """
    import numpy as np  # noqa: F401

    from millstream.protocol.filter.translation import translate

    node = translate(text, bare_fields=bare_fields)
    program = Program(node)
    return Filter(text, canonical_text(node), Uses.of((*program.columns, *program.of_batch)), program)
