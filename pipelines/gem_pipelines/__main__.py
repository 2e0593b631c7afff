"""`python -m gem_pipelines` and `torchrun -m gem_pipelines`: the same program as `gemline`."""

from gem_pipelines.cli import program

if __name__ == "__main__":
    program()
