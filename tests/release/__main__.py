"""`python -m tests.release`"""

import sys

from .loop import main

if __name__ == "__main__":
    sys.exit(main())
