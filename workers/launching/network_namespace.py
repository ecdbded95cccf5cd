"""A network of their own for the processes of a launch, which nobody else on the machine can reach.

A network namespace has ports and a loopback interface of its own; see network_namespaces(7). Root makes one
as it is. Others make a user namespace with it, which takes no privilege, where the system allows that; they
remain who they are in it. Free of torch, and entered before threads are there: the system asks for that.
"""

import ctypes
import errno
import fcntl
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from hybrid.config import RunConfig
from hybrid.storage.remote_path import StoragePath, is_url
from workers.rendezvous.host_requirements import AUTO, LOOPBACK
from workers.rendezvous.master_address import is_loopback

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914  # linux/sockios.h
_IFF_UP = 1
_INTERFACE_FLAGS = struct.Struct("16sh22x")  # struct ifreq of netdevice(7)
# As exceptions of code that connects tell it.
_SIGNS_OF_NO_NETWORK = (
    os.strerror(errno.ENETUNREACH),
    "Temporary failure in name resolution",
    "Name or service not known",
)


def is_wanted(config: RunConfig, folder: StoragePath) -> bool:
    """Whether a launch may have a network of its own: it needs none but loopback.

    Args:
        folder: where it keeps what it writes, which is not always what its configuration says.
    """
    section, data = config.cluster, config.data
    first_rows = (table.initial for table in config.tables.values())
    if any(map(is_url, (str(folder), data.cache_folder, *data.path, *data.test_path, *first_rows))):
        return False  # a store is reached over the machine's
    is_loopback_interface = section.interface in (AUTO, LOOPBACK)
    return section.namespace == "auto" and is_loopback_interface and is_loopback(section.master_address)


def what_is_open(error: OSError) -> str:
    """What a user is told where there is none, for ``error``."""
    return (
        f"no network namespace ({error.strerror}): until all roles are connected, other users of this "
        'machine can reach their ports; docs/security.md says more; cluster.namespace = "off" hides this line'
    )


def hint(failure: str) -> str:
    """What to add to what is told of a failure in a network namespace: the remedy, if it came of that."""
    if not any(sign in failure for sign in _SIGNS_OF_NO_NETWORK):
        return ""
    return '; what launch starts has no network, unless cluster.namespace = "off"'


def enter_network_namespace() -> None:
    """Leave this process, and those that it forks from now on, with a loopback interface of their own.

    Raises:
        OSError: the system does not allow it; the process is as it was.
    """
    if error := _error_in_child(_enter):  # there is no way back from what was entered halfway
        raise OSError(error, os.strerror(error))
    _enter()


def _enter() -> None:
    try:
        _unshare(_CLONE_NEWNET)
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        _unshare(_CLONE_NEWUSER | _CLONE_NEWNET)
        this = Path("/proc/self")
        (this / "setgroups").write_text("deny")
        (this / "uid_map").write_text(f"{user} {user} 1")
        (this / "gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = _INTERFACE_FLAGS.pack(LOOPBACK.encode(), 0)
        name, flags = _INTERFACE_FLAGS.unpack(fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request))
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, _INTERFACE_FLAGS.pack(name, flags | _IFF_UP))


def _unshare(flags: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(flags) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _error_in_child(function: Callable[[], None]) -> int:
    """The number of the system's error that ``function`` comes to in a process of its own; 0 for none."""
    child = os.fork()
    if not child:
        error = 1
        try:
            function()
            error = 0
        except OSError as raised:
            error = raised.errno or error
        finally:
            os._exit(error)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
