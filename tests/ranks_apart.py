"""The command as one rank of a run whose ranks share no disk: `APART=DIR RANK=1 python ranks_apart.py pretrain ...`

In the folder `APART` each rank has a folder of its own, named after the rank: its working directory, with the
rank's own files and its cache.
"""

import os
import sys
from pathlib import Path


if __name__ == "__main__":
    os.chdir(Path(os.environ["APART"]) / os.environ["RANK"])
    os.environ["HF_HOME"] = str(Path("cache").absolute())
    from d2l_bert.__main__ import main  # only now: the libraries read HF_HOME when they are imported

    sys.exit(main(sys.argv[1:]))
