"""Runs a compile command and fails if ptxas had to serialise warpgroup products.

It says so in a remark (C7510 to C7520) that no option makes an error, and the kernel would be right and slow.
"""

import re
import subprocess
import sys


def main() -> int:
    done = subprocess.run(sys.argv[1:], stderr=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stderr)
    serialised = re.search(r"\(C75[12]\d\)", done.stderr)
    if serialised:
        sys.stderr.write(f"error: ptxas serialises warpgroup products {serialised[0]}; the kernel must be mended\n")
    return done.returncode or (1 if serialised else 0)


if __name__ == "__main__":
    sys.exit(main())
