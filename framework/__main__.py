"""`python -m framework` is the same program as `meshwright`."""

import sys

from framework.cli import main

if __name__ == "__main__":
    sys.exit(main())
