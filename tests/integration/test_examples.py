"""Every example is run as its first lines say, in its own folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millstream import sandbox

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE_S_MAX = 100.0

SAYS = {
    "billed_once.py": "bills: 1\n",
    "blocking.py": "0 a\n1 b\n2 c\n",
    "embedded.py": "order 2 of customer-7: 1500 billed\nbilling is done with message 1: True\n",
}


def run(folder: Path, *command: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=EXAMPLE_S_MAX,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    return ended


@pytest.mark.parametrize("name", sorted(SAYS))
def test_an_example_prints_its_expected_output(tmp_path: Path, name: str) -> None:
    assert run(tmp_path, "-W", "error", str(EXAMPLES / name)).stdout == SAYS[name]


def run_pytest(folder: Path, *arguments: str) -> str:
    """Run pytest with our plugin only: other installed ones take seconds to load."""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugin = ("-p", "millstream.pytest_plugin", "-p", "no:cacheprovider")
    return run(folder, "-m", "pytest", "-q", "-W", "error", *plugin, *arguments, environment=environment).stdout


def test_the_tests_of_a_program_pass_with_the_fixtures(tmp_path: Path) -> None:
    (tmp_path / "test_shop.py").write_text((EXAMPLES / "test_shop.py").read_text())
    assert "3 passed" in run_pytest(tmp_path, "test_shop.py")


def test_the_unused_plugin_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_other.py").write_text(
        "import sys\n\ndef test_nothing_is_loaded():\n"
        "    ours = {name for name in sys.modules if name.startswith('millstream')}\n"
        "    assert ours == {'millstream', 'millstream.pytest_plugin'}\n"
    )
    assert "1 passed" in run_pytest(tmp_path, "test_other.py")


def test_pytest_finds_the_plugin_and_nothing_else_changes(request: pytest.FixtureRequest) -> None:
    assert request.config.pluginmanager.has_plugin("millstream")
    assert "_pytest" not in type(sandbox.__spec__.loader).__module__


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {*SAYS, "test_shop.py"}
