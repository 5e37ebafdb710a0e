"""Attack the product with kills, full disks, races, non-finite numbers, signals and damaged files.

Not part of the usual suite. ``pytest tests/attack -m attack`` plays a few rounds of everything, ``--rounds 100`` the
full number (see ``conftest.py``); what was tried and what failed is printed at the end, with what repeats a round.
"""
