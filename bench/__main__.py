"""``python -m bench`` and ``python -m qla.bench``: the command line."""

from qla.bench.cli import main

if __name__ == "__main__":
    main()
