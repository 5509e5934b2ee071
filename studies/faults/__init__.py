"""Faults on purpose: workers killed and stopped, links cut, disks full, files damaged, bits flipped; and soak and scale.

Run it:  python -m studies.faults --quick
"""
