"""`python -m thinwire`, the same as `thinwire`."""

from thinwire.cli import main

if __name__ == "__main__":
    main()
