"""The script with a frozen base in docs/sharded.md, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.harness import ROOT, run_script


@pytest.mark.slow
def test_the_base_is_once_in_memory(tmp_path: Path) -> None:
    """Four ranks take less, all together, than bases of their own would."""
    page = (ROOT / "docs" / "sharded.md").read_text()
    script = re.search(r'```python title="lora\.py"\n(.*?)```', page, re.DOTALL)
    assert script is not None

    def taken(strategy: str) -> int:
        source = script[1].replace('strategy="fsdp"', f'strategy="{strategy}"')
        result = run_script(tmp_path, source, 4, "torchrun", timeout=200).check()
        found = [int(value) for value in re.findall(r"Pss:\s+(\d+) kB", result.output)]
        assert len(found) == 4, result.output
        return sum(found)

    base = 16 * 2048 * 2049 * 4 // 1024
    assert taken("dear") - taken("fsdp") > 2.5 * base
