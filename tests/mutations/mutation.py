"""What a mutation is: a change of the code that breaks a promise, and the test that notices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Mutation"]


@dataclass(frozen=True)
class Mutation:
    """A mutation by hand.

    Args:
        promise: what does not hold any more, as a sentence.
        file: from the root of the project.
        old: text that occurs exactly once in the file.
        new: what stands there instead.
        test: what pytest is asked to run, such as ``tests/overlap/plan/test_choice.py -k pause``. A first word such as
            ``mpi-2`` or ``torchrun-2`` runs it inside every rank of a job of that size.
        survives: why no test fails, if none does: it costs time alone, or nobody can tell the difference.
    """

    promise: str
    file: str
    old: str
    new: str
    test: str
    survives: str = ""

    def applied(self, text: str) -> str:
        """The file's text with the mutation.

        Raises:
            ValueError: the old text is not there exactly once.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} should have this once and has it {count} times:\n{self.old}")
        return text.replace(self.old, self.new)

    def job(self) -> tuple[str, int] | None:
        """Launcher and number of ranks of the job that runs the test, if there is one."""
        found = re.match(r"(mpi|torchrun)-(\d+) ", self.test)
        return (found[1], int(found[2])) if found else None

    def arguments(self) -> list[str]:
        """For pytest."""
        words = self.test.split(" ")[1 if self.job() else 0 :]
        # What follows -k is one argument, of several words.
        if "-k" in words:
            at = words.index("-k")
            return [*words[: at + 1], " ".join(words[at + 1 :])]
        return words

    def test_file(self) -> Path:
        return Path(self.arguments()[0].partition("::")[0])
