"""`python -m stalegraph` is the command line."""

import sys

from stalegraph.cli import main

sys.exit(main())
