"""BaGuaLu: train mixture-of-experts models under a hard memory budget.

Start here: train.py (one rank), launch.py (all ranks of one machine), session.py (the loop).
Importing the package loads neither torch nor the C++ module.
"""

__version__ = "0.1.0"
