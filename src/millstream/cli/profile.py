"""`millstream profile`: named ways to connect, which --profile and MILLSTREAM_PROFILE choose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.options import AsJson, Noun
from millstream.cli.output import one_line, print_json, print_line, print_list, print_note
from millstream.core.errors import InvalidSetting

if TYPE_CHECKING:
    from millstream.client.profile import Profile

app = Noun(
    help="List and show profiles. A profile names brokers, TLS and an identity; --profile selects one.",
    no_args_is_help=True,
)


@app.command("list")
def list_(as_json: AsJson = False) -> None:
    """List the profiles of this user."""
    from millstream.client.profile import profile_file, read_profiles

    stored = sorted(read_profiles().items())
    profiles = [(name, profile) for name, profile in stored if not isinstance(profile, InvalidSetting)]
    problems = [str(profile) for _, profile in stored if isinstance(profile, InvalidSetting)]
    listed = [{"profile": name, **profile.shown()} for name, profile in profiles]
    print_list(
        {"file": str(profile_file()), "profiles": listed, "problems": problems},
        ("profile", "brokers", "tls", "identity"),
        [[name, profile.brokers, profile.has_tls, _identity(profile)] for name, profile in profiles],
        empty=f"No profiles; describe some in {profile_file()}.",
        as_json=as_json,
    )
    for problem in problems if not as_json else ():
        print_note(problem)


@app.command("show")
def show(
    name: Annotated[str, typer.Argument(help="The name of the profile.", show_default=False)], as_json: AsJson = False
) -> None:
    """Show a profile, without its secrets."""
    from millstream.client.profile import load_profile

    shown = {"profile": name, **load_profile(name).shown()}
    if as_json:
        print_json(shown)
    else:
        for key, value in shown.items():
            print_line(f"{key}: {one_line(str(value).lower() if value is True else value)}")


def _identity(profile: Profile) -> str:
    if profile.user:
        return f"user {profile.user}"
    if profile.token or profile.token_file:
        return "token"
    return "certificate" if profile.tls_cert else ""
