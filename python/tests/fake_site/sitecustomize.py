"""Gives processes of a test the fake C++ module, where BAGUALU_FAKE_RUNTIME is set."""

import importlib.util
import os
import sys
from pathlib import Path

_FAKE = Path(__file__).with_name("fake_runtime.py")


class _Finder:
    """Answers for bagualu._runtime before the real module is looked for."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name != "bagualu._runtime":
            return None
        return importlib.util.spec_from_file_location(name, _FAKE)


if os.environ.get("BAGUALU_FAKE_RUNTIME"):
    sys.meta_path.insert(0, _Finder)
