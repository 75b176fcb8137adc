"""How many cases to try: ``FAULTS=thorough`` tries all that there are, or thousands of them."""

from __future__ import annotations

import os

IS_THOROUGH = os.environ.get("FAULTS") == "thorough"
EVERY_KTH = 1 if IS_THOROUGH else 3
FLIPS_A_FILE = 500 if IS_THOROUGH else 2
CUTS_A_FILE = 50 if IS_THOROUGH else 0
