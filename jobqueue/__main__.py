"""`python -m jobqueue`."""

if __name__ == "__main__":
    import sys

    try:
        if sys.argv[1:2] == ["worker"]:
            from jobqueue.signals import SIGNALS

            SIGNALS.install()
        from jobqueue.cli import main

        exit_code = main()
    except KeyboardInterrupt:  # while still importing
        exit_code = 130
    sys.exit(exit_code)
