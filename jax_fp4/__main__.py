"""The doctor: `python -m jax_fp4` says what this installation is, what runs, and whether it works.

Exit code 0 where all is well, 1 where something is off: each is said at the end, with the next thing to do.
"""

import argparse
import os
import sys

from jax_fp4._doctor import Finding, examine


def main(arguments: list[str] | None = None) -> int:
    """Prints the page; returns the exit code."""
    description = "Says what this installation of jax_fp4 is, what runs for each operation, and whether it works."
    argparse.ArgumentParser(prog="python -m jax_fp4", description=description).parse_args(arguments)
    findings: list[Finding] = []
    for part in examine():
        print("\n  ".join([part.title, *part.lines]), end="\n\n", flush=True)
        findings += part.findings
    if not findings:
        print("All is well.")
        return 0
    print("Off:")
    for number, finding in enumerate(findings, 1):
        print(f"  {number}. {finding.what}\n     Next: {finding.fix}")
    return 1


def _piped() -> int:
    """main; where the reader of a pipe has read enough (`| head -1`), 1 without a word: the page was not finished."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python, which flushes once more as it ends
        code = 1
    return code


if __name__ == "__main__":
    sys.exit(_piped())
