"""Makes `python -m kvd` the same as `kvd`."""

from __future__ import annotations

import sys

from kvd.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
