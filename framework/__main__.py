"""`python -m framework` is the same program as `meshwright`."""

import sys

from framework.start import guard_imports

if __name__ == "__main__":
    guard_imports()  # before other imports, which a file of the working folder could take
    from framework.cli import main

    sys.exit(main())
