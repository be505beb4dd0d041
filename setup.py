"""Adds the optional native helper to what pyproject.toml builds. Where it cannot be built, everything else is.

It needs a C compiler and the header xxhash.h: in the directory that MEMSTORE_XXHASH_INCLUDE names, of the package
libxxhash-dev, or the one that pyarrow carries. Where there is a compiler and no header, a build asks for pyarrow.
"""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext


def _include_dirs() -> list[str]:
    named = os.environ.get("MEMSTORE_XXHASH_INCLUDE", "")
    if named:
        return [named]
    pyarrow = importlib.util.find_spec("pyarrow")
    carried = [
        Path(folder, "include/arrow/vendored/xxhash")
        for folder in (pyarrow and pyarrow.submodule_search_locations) or []
    ]
    return [str(folder) for folder in carried if (folder / "xxhash.h").is_file()]


HELPER = Extension(
    "memstore.shell.native._native",
    ["memstore/shell/native/native.c"],
    include_dirs=_include_dirs(),
    extra_compile_args=["-O2"],
    py_limited_api=True,  # one wheel for Python 3.10 and all after it
)


class _Trial(build_ext):
    """Compiles an extension to see whether it can be: without it the wheel is one for every machine."""

    def succeeds(self) -> bool:
        """Return whether it can be built; the compiler says why not."""
        with tempfile.TemporaryDirectory() as folder:
            self.build_temp = self.build_lib = str(Path(folder))
            self.inplace = False
            try:
                self.run()
            except Exception:
                return False
        return True


def _compiles(extension: Extension) -> bool:
    trial = _Trial(Distribution({"name": "trial", "ext_modules": [extension], "packages": []}))
    trial.ensure_finalized()
    return trial.succeeds()


def _lacks_header_only() -> bool:
    """Return whether this machine compiles for Python, and has no xxhash.h; on the platform of pyarrow's wheels."""
    if HELPER.include_dirs or sys.platform != "linux" or _compiles(HELPER):
        return False
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "trial.c")
        source.write_text("#include <Python.h>\nint memstore_trial;\n")
        return _compiles(Extension("trial", [str(source)]))


def _helpers() -> list[Extension]:
    if _compiles(HELPER):
        return [HELPER]
    print(
        "memstore is built without its native helper: that needs a C compiler and xxhash.h. Python's loops copy.",
        file=sys.stderr,
    )
    return []


# Any other command only lists files, among them the C file.
is_built = not {"build", "build_ext", "bdist_wheel", "develop", "editable_wheel", "install"}.isdisjoint(sys.argv)
helpers = _helpers() if is_built else [HELPER]
is_asked_what_it_needs = "egg_info" in sys.argv  # by the front end, before it builds
setup(
    ext_modules=helpers,
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if helpers else {},
    setup_requires=["pyarrow"] if is_asked_what_it_needs and _lacks_header_only() else [],
)
