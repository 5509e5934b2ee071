"""Faults on purpose: workers killed or stopped, links cut, disks full, files damaged, bits flipped; soak and scale.

Run it:  python -m studies.faults --quick
"""
