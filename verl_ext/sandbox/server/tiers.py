"""The tiers of isolation, strongest first, and what each covers."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    """How a sandbox is kept from the machine.

    bubblewrap
        Covered: network (a network namespace of its own with only loopback), files (a root made of the system's
        read-only /usr and the Python installation; /tmp and home are private and limited in size), processes
        (a pid namespace of its own: nothing outside can be seen, signalled or traced, and all of it dies at
        once), environment, all capabilities, new namespaces, memory, CPU time, descriptors, process count.
        Not covered: faults of the kernel itself; CPU share and disk bandwidth (a sandbox may use a whole core);
        reading the Python installation and /usr.
    landlock
        Covered: files (read-only system and Python installation; writing in the sandbox's own folder only), the
        network (no sockets but Unix ones, and no connecting those), tracing and memory of other processes,
        mounts, namespaces, keyrings, signals to processes outside (by Landlock from Linux 6.12, by refusing
        kill() altogether before), environment, memory, CPU time, descriptors.
        Not covered: that other processes exist (their ids can be probed), the total disk used, /dev/shm and
        /home/user as absolute paths (absent), process count without a user of its own (then counted once a
        second), faults of the kernel.
    rlimits
        Covered: memory, CPU time, descriptors and file size of one process; what the server's environment held is
        not handed down; with root, all capabilities and, if it can read the Python installation, a user of its
        own per sandbox.
        Not covered: network, files, other processes of the same user: they can be signalled, traced and, unless
        the server is root, their environment read.
    none
        Covered: nothing. The model's code runs with the rights of the server.
    """

    BUBBLEWRAP = "bubblewrap"
    LANDLOCK = "landlock"
    RLIMITS = "rlimits"
    NONE = "none"


AUTO_ORDER = (Tier.BUBBLEWRAP, Tier.LANDLOCK, Tier.RLIMITS)
"""What `auto` tries, in this order."""
