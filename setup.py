"""Builds the compiled parts: every .pyx of kvd_core/ and kvd/ becomes one C++17 extension module.

KVD_DEBUG=1 builds with assertions, and with `verify()` after every batch that a stream applies and
every clear of a stream (-DKVD_VERIFY).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("KVD_DEBUG") == "1"
# Relative, as setuptools requires: this file runs in its own folder. C++ headers include each other
# relative to these folders: `index/tree.hpp`.
PACKAGES = [Path("kvd_core"), Path("kvd")]
FLAVOUR = Path("build/flavour")

MACROS: list[tuple[str, str | None]] = [("XXH_INLINE_ALL", "1")]
# No fused multiply-add (aarch64): costs of candidates are the same to the last bit everywhere.
COMMON_FLAGS = ["-std=c++17", "-ffp-contract=off", "-fvisibility=hidden"]
# Writes beyond a buffer on the stack, or beyond memory of a known size, end the process. LINK_FLAGS
# make tables of addresses read-only once all addresses are known, at the start.
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
    """Returns a file that changes when the flavour or its flags do, so that objects are rebuilt."""
    built = " ".join(["debug", *DEBUG_FLAGS] if DEBUG else ["release", *RELEASE_FLAGS, *LINK_FLAGS])
    if not FLAVOUR.exists() or FLAVOUR.read_text() != built:
        FLAVOUR.parent.mkdir(exist_ok=True)
        FLAVOUR.write_text(built)
    return str(FLAVOUR)


def files(*patterns: str) -> list[str]:
    """Returns the files of the packages that match patterns such as `**/*.hpp`."""
    return sorted(
        str(path) for package in PACKAGES for each in patterns for path in package.glob(each)
    )


def extension(source: str) -> Extension:
    return Extension(
        ".".join(Path(source).with_suffix("").parts),
        [source],
        language="c++",
        include_dirs=[str(package) for package in PACKAGES],
        depends=[*files("**/*.hpp", "**/*.pxd"), flavour_stamp()],
        define_macros=[*MACROS, ("KVD_VERIFY", "1"), ("_GLIBCXX_ASSERTIONS", "1")]
        if DEBUG
        else MACROS,
        undef_macros=["NDEBUG"] if DEBUG else [],
        extra_compile_args=DEBUG_FLAGS if DEBUG else RELEASE_FLAGS,
        extra_link_args=[] if DEBUG else LINK_FLAGS,
    )


class BuildCore(build_ext):
    """Reports a missing compiler or header in one line, instead of the compiler's two hundred.

    An editable installation finds what `build_ext --inplace` has built; in setuptools' temporary
    folders all would be compiled anew.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.editable_mode:
            self.build_lib, self.build_temp = (
                f"build/{kind}.{self.plat_name}-{sys.implementation.cache_tag}"
                for kind in ("lib", "temp")
            )

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
        [extension(source) for source in files("**/*.pyx")],
        compiler_directives=DIRECTIVES,
        quiet=True,
    ),
)
