"""Adds the optional native helper to what pyproject.toml builds. Where it cannot be built, everything else is.

It needs a C compiler and the header xxhash.h, of the package libxxhash-dev or in the directory that
MEMSTORE_XXHASH_INCLUDE names; `make native` names the one that pyarrow carries.
"""

import os
import sys
import tempfile
from pathlib import Path

from setuptools import Distribution, Extension, setup
from setuptools.command.build_ext import build_ext

HELPER = Extension(
    "memstore.shell.native._native",
    ["memstore/shell/native/native.c"],
    include_dirs=[path for path in [os.environ.get("MEMSTORE_XXHASH_INCLUDE", "")] if path],
    extra_compile_args=["-O2"],
    py_limited_api=True,  # one wheel for Python 3.10 and all after it
)


class _Trial(build_ext):
    """Compiles the helper to see whether it can be: without it the wheel is one for every machine."""

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


def _helpers() -> list[Extension]:
    trial = _Trial(Distribution({"name": "trial", "ext_modules": [HELPER], "packages": []}))
    trial.ensure_finalized()
    if trial.succeeds():
        return [HELPER]
    print(
        "memstore is built without its native helper: that needs a C compiler and xxhash.h. Python's loops copy.",
        file=sys.stderr,
    )
    return []


# Any other command only lists files, among them the C file.
is_built = not {"build", "build_ext", "bdist_wheel", "develop", "editable_wheel", "install"}.isdisjoint(sys.argv)
helpers = _helpers() if is_built else [HELPER]
setup(ext_modules=helpers, options={"bdist_wheel": {"py_limited_api": "cp310"}} if helpers else {})
