"""`python -m graphcap` is the command `graphcap`."""

import sys

from graphcap.cli import main

sys.exit(main())
