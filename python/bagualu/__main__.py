"""`python -m bagualu COMMAND ...` is `python -m bagualu.launch COMMAND ...`."""

import sys

from bagualu.launch import main

sys.exit(main())
