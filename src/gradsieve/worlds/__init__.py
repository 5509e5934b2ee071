"""Where programs run: over a process group, or as virtual workers in one process."""

from gradsieve.worlds.base import World
from gradsieve.worlds.meter import Meter
from gradsieve.worlds.process_group import ProcessGroupWorld, group_of
from gradsieve.worlds.virtual import VirtualWorld
from gradsieve.worlds.waiting import PeerLost, WorkersDiverged

__all__ = ["Meter", "PeerLost", "ProcessGroupWorld", "VirtualWorld", "WorkersDiverged", "World", "group_of"]
