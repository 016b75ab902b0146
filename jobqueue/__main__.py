"""`python -m jobqueue`."""

if __name__ == "__main__":
    import sys

    try:
        if sys.argv[1:2] == ["worker"]:
            # A Ctrl+C is held back until somebody counts it: raised inside an import it can get lost.
            import _signal  # type: ignore[import-not-found]  # of `signal`, which takes ms to import

            held_back = (_signal.SIGINT, _signal.SIGTERM)
            _signal.pthread_sigmask(_signal.SIG_BLOCK, held_back)
            from jobqueue.signals import SIGNALS

            SIGNALS.install()
            _signal.pthread_sigmask(_signal.SIG_UNBLOCK, held_back)
        from jobqueue.cli import main

        exit_code = main()
    except KeyboardInterrupt:  # while still importing
        exit_code = 130
    sys.exit(exit_code)
