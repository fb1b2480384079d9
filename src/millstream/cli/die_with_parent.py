"""Becomes another command that ends when the process that started it ends, however it ends.

    python die_with_parent.py PARENT_PID SIGNAL USER COMMAND [ARGUMENT ...]

It is run as a file, imports only the standard library and is replaced by the command. SIGNAL is sent to the command
when the parent ends. USER is the name of an account to run as, or `-`: PostgreSQL refuses to run as root. The command
then keeps root's right to traverse folders, since its files may be in one that is closed to others.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import sys

_SET_DEATH_SIGNAL = 1
_SET_KEEP_CAPABILITIES = 8
_AMBIENT = 47
_AMBIENT_RAISE = 2
_CAPABILITY_VERSION = 0x20080522
_DAC_OVERRIDE = 1

_libc = ctypes.CDLL(None, use_errno=True)


def switch_account(account: str) -> None:
    """Drop root for another account, but keep the right to traverse every folder if the machine allows it."""
    entry = pwd.getpwnam(account)
    _libc.prctl(_SET_KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setgroups([])
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    mask = 1 << _DAC_OVERRIDE
    # Effective, permitted and inheritable, first for the lower 32 capabilities, then for the upper.
    sets = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)
    if _libc.capset(header, sets) == 0:
        _libc.prctl(_AMBIENT, _AMBIENT_RAISE, _DAC_OVERRIDE, 0, 0)


def die_with_parent(parent: int, number: int) -> None:
    """Ask the kernel for a signal when the parent ends. Switching accounts clears this, so it comes last."""
    _libc.prctl(_SET_DEATH_SIGNAL, number, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit("the parent process has exited")


def main(parent: str, number: str, account: str, *command: str) -> None:
    """Replace this process by the command."""
    if account != "-":
        switch_account(account)
    die_with_parent(int(parent), int(number))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
