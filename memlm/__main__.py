"""`python -m memlm` is the `memlm` command."""

from memlm.cli import main

if __name__ == "__main__":
    main()
