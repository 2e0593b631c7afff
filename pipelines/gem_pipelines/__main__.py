"""`python -m gem_pipelines` and `torchrun -m gem_pipelines`: the same program as `gemline`."""

import sys

from gem_pipelines.cli import main

if __name__ == "__main__":
    sys.exit(main())
