"""Emulation of a link with a delay and a bandwidth between two interfaces, for kernels without netem.

``python link_emulator.py SECONDS BITS_PER_SECOND INTERFACE INTERFACE`` forwards frames as root, until it is
killed. A frame leaves after the frames before it, at this bandwidth, and arrives SECONDS later.
"""

import os
import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

_EVERY_PROTOCOL = 3  # linux/if_ether.h
_SOL_PACKET, _HAS_OFFLOAD_HEADER, _IGNORES_OUTGOING = 263, 15, 23  # linux/if_packet.h
_SO_RCVBUFFORCE, _BUFFER_BYTES = 33, 1 << 26
_LARGEST_BYTES = 1 << 17  # frames have up to 64 KiB, which the kernel cuts later
_IDLE_SECONDS = 1.0


def main(delay_seconds: float, bits_per_second: float, first: socket.socket, second: socket.socket) -> None:
    """Forward between two packet sockets; does not return."""
    frames: dict[socket.socket, deque[tuple[float, bytes]]] = {first: deque(), second: deque()}  # by target
    sent_at = {first: 0.0, second: 0.0}
    while True:
        now = time.monotonic()
        next_at = min((queue[0][0] for queue in frames.values() if queue), default=now + _IDLE_SECONDS)
        for source in select.select([first, second], [], [], max(0.0, next_at - now))[0]:
            target = second if source is first else first
            with suppress(BlockingIOError):
                while frame := source.recv(_LARGEST_BYTES):
                    sent_at[target] = (
                        max(sent_at[target], time.monotonic()) + 8 * len(frame) / bits_per_second
                    )
                    frames[target].append((sent_at[target] + delay_seconds, frame))
        for target, queue in frames.items():
            while queue and queue[0][0] <= time.monotonic():
                with suppress(OSError):  # the interface is down: the frame is lost
                    target.send(queue.popleft()[1])


def _open(interface: str) -> socket.socket:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW | socket.SOCK_NONBLOCK)
    port.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _BUFFER_BYTES)
    port.setsockopt(_SOL_PACKET, _HAS_OFFLOAD_HEADER, 1)
    port.setsockopt(_SOL_PACKET, _IGNORES_OUTGOING, 1)
    port.bind((interface, _EVERY_PROTOCOL))
    return port


if __name__ == "__main__":
    os.nice(-20)  # frames are not late because roles are busy
    main(float(sys.argv[1]), float(sys.argv[2]), *map(_open, sys.argv[3:]))
