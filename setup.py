"""Builds the core: every kvd_core/*.pyx becomes one C++17 extension module.

KVD_DEBUG=1 builds with assertions and with `verify()` after every batch that a stream
applies or clear of a stream (-DKVD_VERIFY).
"""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("KVD_DEBUG") == "1"
CORE = Path("kvd_core")  # setuptools wants paths relative to this file, and runs in its folder
FLAVOUR = Path("build/flavour")

MACROS: list[tuple[str, str | None]] = [("XXH_INLINE_ALL", "1")]
# Costs of candidates are the same to the last bit everywhere: no fused multiply-add (aarch64).
COMMON_FLAGS = ["-std=c++17", "-ffp-contract=off", "-fvisibility=hidden"]
# What lies behind a buffer on the stack, or in memory of a known size, is not written over unseen;
# tables of addresses are read-only once all of them are known, at the start.
HARDENING = ["-fstack-protector-strong", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"]
RELEASE_FLAGS = [*COMMON_FLAGS, *HARDENING, "-O3", "-g0", "-fno-plt"]
LINK_FLAGS = ["-Wl,-z,relro", "-Wl,-z,now", "-Wl,-s"]
DEBUG_FLAGS = [*COMMON_FLAGS, "-O1", "-g"]
DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "initializedcheck": DEBUG,
    "wraparound": False,
    "cdivision": True,
    "embedsignature": True,
}


def flavour_stamp() -> str:
    """Returns a file that changes when the flavour or its flags do, so that other objects go."""
    said = " ".join(["debug", *DEBUG_FLAGS] if DEBUG else ["release", *RELEASE_FLAGS, *LINK_FLAGS])
    if not FLAVOUR.exists() or FLAVOUR.read_text() != said:
        FLAVOUR.parent.mkdir(exist_ok=True)
        FLAVOUR.write_text(said)
    return str(FLAVOUR)


def extension(source: Path) -> Extension:
    headers = sorted(str(path) for pattern in ("*.hpp", "*.pxd") for path in CORE.glob(pattern))
    return Extension(
        f"{CORE.name}.{source.stem}",
        [str(source)],
        language="c++",
        include_dirs=[str(CORE)],
        depends=[*headers, flavour_stamp()],
        define_macros=[*MACROS, ("KVD_VERIFY", "1"), ("_GLIBCXX_ASSERTIONS", "1")]
        if DEBUG
        else MACROS,
        undef_macros=["NDEBUG"] if DEBUG else [],
        extra_compile_args=DEBUG_FLAGS if DEBUG else RELEASE_FLAGS,
        extra_link_args=[] if DEBUG else LINK_FLAGS,
    )


class BuildCore(build_ext):
    """Says what is missing before the compiler says it in two hundred lines."""

    def run(self) -> None:
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        try:
            probe = subprocess.run(
                [*compiler, "-fsyntax-only", "-x", "c++", "-"],
                input=b"#include <xxhash.h>\n",
                capture_output=True,
            )
        except OSError:
            raise SystemExit(
                f"kvd: no C++ compiler ({compiler[0]}); on Debian: apt-get install g++"
            ) from None
        if probe.returncode:
            raise SystemExit(
                "kvd: the header xxhash.h is missing; on Debian: apt-get install libxxhash-dev"
            )
        super().run()


setup(
    cmdclass={"build_ext": BuildCore},
    options={"build_ext": {"parallel": os.cpu_count()}},
    ext_modules=cythonize(
        [extension(source) for source in sorted(CORE.glob("*.pyx"))],
        compiler_directives=DIRECTIVES,
        quiet=True,
    ),
)
