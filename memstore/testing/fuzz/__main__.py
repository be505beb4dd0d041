"""Coverage-guided fuzzing of decoders and plans: `python -m memstore.testing.fuzz TARGET SECONDS`, or `make fuzz`.

It needs atheris (the `fuzz` extra), which drives libFuzzer over instrumented bytecode. It ends with the first finding,
whose input it writes to `build/fuzz`, beside the corpora. Without a finding it prints how many inputs it ran.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

FOLDER = Path("build/fuzz")
RSS_LIMIT_MIB = 3072
"""torch and its instrumentation take a few hundred; one input of INPUT_BYTES_MAX may not take gigabytes."""
INPUT_BYTES_MAX = 8192
INPUT_LIMIT_S = 10


def main(argv: list[str]) -> int:
    """Fuzz one target; return only if it could not begin."""
    try:
        import atheris
    except ImportError:
        sys.stderr.write("fuzzing needs atheris: pip install -e '.[fuzz]'\n")
        return 1
    name, seconds = argv[1], int(argv[2])
    with atheris.instrument_imports(include=["memstore", "recovery"]):
        targets = importlib.import_module("memstore.testing.fuzz.targets")
    corpus = FOLDER / name  # kept, because libFuzzer ends the process; the next run goes on from it
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(targets.SEEDS[name]()):
        (corpus / f"seed-{number}").write_bytes(seed)
    options = [f"-max_total_time={seconds}", f"-max_len={INPUT_BYTES_MAX}", f"-rss_limit_mb={RSS_LIMIT_MIB}"]
    options += [f"-timeout={INPUT_LIMIT_S}", "-print_final_stats=1", "-verbosity=0", "-use_value_profile=1"]
    options += [f"-artifact_prefix={FOLDER}/{name}-"]
    atheris.Setup([argv[0], *options, str(corpus)], targets.TARGETS[name])
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
