"""Builds the extensions: every pyx/ucxkv/*.pyx becomes the module of that name in ucxkv."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

# UCXKV_COVERAGE=1 builds for measuring coverage of the .pyx, UCXKV_SANITIZE=address (or another)
# with that sanitizer, UCXKV_QUICK_BUILD=1 without optimization.  Timestamps do not tell such builds
# from ordinary ones: the way back is `build_ext --force`.
coverage = os.environ.get("UCXKV_COVERAGE") == "1"
sanitize = os.environ.get("UCXKV_SANITIZE")
quick = os.environ.get("UCXKV_QUICK_BUILD") == "1"
special = coverage or quick or bool(sanitize)


def ucx_root() -> Path:
    """Headers and libraries of the libucx wheel, which is a build requirement."""
    spec = importlib.util.find_spec("libucx")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package libucx-cu12 is needed to build ucxkv")
    return Path(spec.submodule_search_locations[0])


class BuildExtensions(build_ext):
    """Translates the .pyx only when something is compiled, which metadata and sdists do without."""

    def build_extensions(self) -> None:
        from Cython.Build import cythonize

        translated = cythonize(
            self.extensions,
            include_path=["pyx"],
            # Cython's coverage plugin looks for the .c beside the .pyx.
            build_dir=None if coverage else "build/cython",
            nthreads=2,
            force=self.force,
            compiler_directives={
                "language_level": 3,
                "boundscheck": False,
                "wraparound": False,
                "cdivision": True,
                "initializedcheck": False,
                "embedsignature": True,
                "linetrace": coverage,
            },
        )
        sources = {extension.name: extension.sources for extension in translated}
        ucx = ucx_root()
        for extension in self.extensions:
            extension.sources = sources[extension.name]
            # As system headers, which the compiler does not warn of.
            extension.extra_compile_args += ["-isystem", str(ucx / "include")]
            extension.library_dirs.append(str(ucx / "lib"))
        super().build_extensions()


flags = ["-g1", "-D_GNU_SOURCE", "-pthread"]
link_flags = ["-pthread"]
if sanitize:
    flags += [f"-fsanitize={sanitize}", "-fno-omit-frame-pointer"]
    link_flags += [f"-fsanitize={sanitize}"]


def optimization(module: str) -> str:
    """As much as is worth its time: loops over arrays of numbers are worth being vectorized."""
    if quick:
        return "-O0"
    return "-O3" if module == "blocks" else "-O2"


# No rpath: ucxkv/_load.py loads one libucp before the first extension asks for it by its name.
setup(
    cmdclass={"build_ext": BuildExtensions},
    ext_modules=[
        Extension(
            f"ucxkv.{path.stem}",
            [path.as_posix()],
            libraries=["ucp", "ucs"],
            extra_compile_args=[optimization(path.stem), *flags],
            extra_link_args=link_flags,
            define_macros=[("CYTHON_TRACE_NOGIL", "1")] if coverage else [],
        )
        for path in sorted(Path("pyx/ucxkv").glob("*.pyx"))
    ],
    options={"build_ext": {"parallel": 2, "force": special}},
)
