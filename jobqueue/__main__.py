"""`python -m jobqueue`."""

if __name__ == "__main__":
    import sys

    try:
        from jobqueue.cli import main

        exit_code = main()
    except KeyboardInterrupt:  # while still importing
        exit_code = 130
    sys.exit(exit_code)
