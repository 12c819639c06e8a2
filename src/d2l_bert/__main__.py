"""`python -m d2l_bert`, and so `accelerate launch -m d2l_bert`."""

import sys

from d2l_bert.cli import main


if __name__ == "__main__":
    sys.exit(main())
