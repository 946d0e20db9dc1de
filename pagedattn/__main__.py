"""`python -m pagedattn` is the command `pagedattn`."""

import sys

from .cli.command import main

sys.exit(main())
