"""Runs a command under restrictions of systemd/kvd.service on system calls:

    python tests/support/unit_sandbox.py COMMAND...

Only sockets of the families that RestrictAddressFamilies names can be opened, and the calls of
`SystemCallFilter=~@privileged` that change the owner of files fail. packaging/probe.py checks the
rest of the unit in a booted machine.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys

# <linux/prctl.h>, <linux/seccomp.h>, <linux/filter.h>
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 22, 38
SECCOMP_MODE_FILTER = 2
ALLOW, FAIL = 0x7FFF0000, 0x00050000
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
NUMBER, FIRST_ARGUMENT = 0, 16  # offsets in struct seccomp_data

# <asm/unistd.h>, by machine
SOCKET = {"x86_64": 41, "aarch64": 198}
CHANGE_OWNER = {"x86_64": (92, 93, 94, 260), "aarch64": (54, 55)}
FAMILIES = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)

Step = tuple[int, int, int, int]  # code, steps to skip if true, if false, and a number


def program(machine: str) -> list[Step]:
    steps: list[Step] = [(LOAD, 0, 0, NUMBER)]
    for number in CHANGE_OWNER[machine]:
        steps += [(EQUAL, 0, 1, number), (RETURN, 0, 0, FAIL | errno.EPERM)]
    steps += [(EQUAL, 1, 0, SOCKET[machine]), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, FIRST_ARGUMENT)]
    for family in FAMILIES:
        steps += [(EQUAL, 0, 1, family), (RETURN, 0, 0, ALLOW)]
    return [*steps, (RETURN, 0, 0, FAIL | errno.EAFNOSUPPORT)]


def confine() -> None:
    steps = program(platform.machine())
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in steps))
    # struct sock_fprog
    whole = ctypes.create_string_buffer(struct.pack("@HP", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, whole, 0, 0
    ):
        raise OSError(ctypes.get_errno(), "no seccomp")


if __name__ == "__main__":
    confine()
    os.execvp(sys.argv[1], sys.argv[1:])
