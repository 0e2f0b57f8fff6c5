"""``python -m keepstep.cli``: the same as the ``keepstep`` command."""

import sys

from keepstep.cli import main

sys.exit(main())
