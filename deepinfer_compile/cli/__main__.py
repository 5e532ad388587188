"""`python -m deepinfer_compile.cli`: the console script."""

from deepinfer_compile.cli import main

if __name__ == "__main__":
    main()
