"""Runs the command line: `python -m stretto.cli`."""

from stretto.cli.main import main

if __name__ == "__main__":
    main()
