"""Errors as a caller reads them: the line that matters, without the threads that it came through."""

from __future__ import annotations

import subprocess
import sys
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout

import pytest

from memstore.errors import RecoveryError
from memstore.shell.threads.waits import answer_of


def fail() -> None:
    raise RecoveryError("no whole step")


def test_an_error_comes_without_the_frames_of_other_threads() -> None:
    """What is raised is the same error; its traceback begins with the caller and ends where it asked."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(fail)
        with pytest.raises(RecoveryError, match="no whole step") as caught:
            answer_of(asked, 10.0)
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert frames[-1] == "answer_of"
    assert "fail" not in frames
    assert "concurrent" not in "".join(traceback.format_exception(caught.value))


def test_an_answer_is_returned_and_waited_for() -> None:
    future: Future[int] = Future()
    with pytest.raises(FutureTimeout):
        answer_of(future, 0.0)
    future.set_result(3)
    assert answer_of(future) == 3


@pytest.mark.parametrize("package", ["ray", "torch"])
def test_a_missing_package_is_named_with_its_remedy(package: str) -> None:
    """Importing memstore works without it; using what needs it says what to install."""
    code = (
        f"import sys; sys.modules[{package!r}] = None; import memstore\n"
        "for name in ('start', 'connect'):\n"
        "    try:\n        getattr(memstore, name)\n"
        "    except memstore.ConfigError as error:\n        print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert f"needs the package {package}" in done.stdout
    assert "pip install" in done.stdout
