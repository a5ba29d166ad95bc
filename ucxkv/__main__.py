"""``python -m ucxkv``: the same as the command ``ucxkv``."""

import sys

from ucxkv.cli import main

# A spawned process of the demo imports this module too, under another name.
if __name__ == "__main__":
    sys.exit(main())
