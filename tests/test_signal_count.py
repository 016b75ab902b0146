"""Counting the signals that ask a worker to stop."""

from __future__ import annotations

import os
import signal
import unittest

from jobqueue.signals import Signals

NUMBERS = (signal.SIGINT, signal.SIGTERM)


class SignalsTest(unittest.TestCase):
    """In the main thread of the tests, whose own handlers are put back."""

    def setUp(self) -> None:
        self.old = [signal.getsignal(number) for number in NUMBERS]
        for number, handler in zip(NUMBERS, self.old, strict=True):
            self.addCleanup(signal.signal, number, handler)

    def test_they_are_counted_and_the_old_handlers_come_back(self) -> None:
        with Signals() as signals:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            self.assertEqual((signals.count, signals.last), (2, signal.SIGTERM))
        self.assertEqual([signal.getsignal(number) for number in NUMBERS], self.old)
        self.assertEqual((signals.count, signals.last), (0, 0))

    def test_once_installed_one_that_comes_late_is_still_only_counted(self) -> None:
        signals = Signals()
        signals.install()
        with signals:
            pass
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        self.assertEqual(signals.count, 2)


if __name__ == "__main__":
    unittest.main()
