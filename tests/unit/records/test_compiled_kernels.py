"""Kernels work where machine code cannot be cached, as for a service without a home on a read-only installation."""

from __future__ import annotations

from typing import Any

from millstream.protocol.records.kernels.compiled import compiled


def test_a_kernel_is_compiled_where_nothing_can_be_cached() -> None:
    # No cache folder is found for a function that is in no file.
    names: dict[str, Any] = {}
    exec(compile("def increased(number):\n    return number + 1\n", "<nowhere>", "exec"), names)
    kernel: Any = compiled(names["increased"])
    assert kernel(1) == 2
    assert kernel.signatures
