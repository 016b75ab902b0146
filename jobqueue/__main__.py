"""`python -m jobqueue`."""

if __name__ == "__main__":
    import sys

    from jobqueue.cli import main

    sys.exit(main())
