"""``python -m bench.kernels``: how fast a rank combines what arrived, every type and operation, beside memcpy.

In the cache, where kernels differ; `--bytes` beyond it times the memory. Medians of one run: compare rows of one run.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.cpp.build import program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=128 * 1024, help="of each operand (default 128 KB)")
    parser.add_argument("--seconds", type=float, default=0.1, help="for each row (default 0.1)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        built = program(Path(folder), Path(__file__).with_suffix(".cpp"))
        return subprocess.run([str(built), str(arguments.bytes), str(arguments.seconds)], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
