"""The tests of jobqueue: `python -m unittest discover` at the top of the checkout runs them all.

They start hundreds of short commands.  Where Python was told to write no byte code, each of
these would compile the package anew, so they get a place of their own for it.
"""

import atexit
import os
import shutil
import sys
import tempfile

if sys.dont_write_bytecode and "PYTHONPYCACHEPREFIX" not in os.environ:
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = tempfile.mkdtemp(prefix="jobqueue-bytecode-")
    atexit.register(shutil.rmtree, os.environ["PYTHONPYCACHEPREFIX"], ignore_errors=True)
