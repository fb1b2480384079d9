"""What `millstream demo` tells a person."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.cli.exit_code import CommandFailed

if TYPE_CHECKING:
    from rich.console import Console
from rich.markup import escape


class Account:
    """Tells a person what happens, and stops the demo when something does not hold."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._number = 0

    def step(self, title: str) -> None:
        """Begin the next part."""
        self._number += 1
        self._console.print(f"\n[bold]{self._number}. {title}[/bold]")

    def tell(self, text: str) -> None:
        """Say something that cannot fail."""
        self._console.print(f"   {escape(text)}", soft_wrap=True)

    def check(self, held: bool, text: str, otherwise: str) -> None:
        """Say that something holds, or end the demo with the reason."""
        if not held:
            raise CommandFailed(f"the demo failed: expected that {text}, but {otherwise}")
        self._console.print(f"   [green]✓[/green] {escape(text)}", soft_wrap=True)

    def end(self, text: str) -> None:
        """Say how it ended."""
        self._console.print(f"\n[bold green]{text}[/bold green]")
