"""The command `d2l-bert` as a module: for `python -m d2l_bert` and `accelerate launch -m d2l_bert`."""

import sys

from d2l_bert.cli import main


if __name__ == "__main__":
    sys.exit(main())
