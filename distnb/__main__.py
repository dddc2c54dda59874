"""Entry point of `python -m distnb`, the same as the command `distnb`."""

import sys

from distnb.cli import main

if __name__ == "__main__":
    sys.exit(main())
