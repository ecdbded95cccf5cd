"""A network namespace for the processes of a launch, which other users of the machine cannot reach.

A network namespace has its own ports and loopback interface; see network_namespaces(7). Root creates one
directly. Other users create a user namespace with it, which needs no privilege if the system allows it, and
keep their user id. Free of torch, and entered before threads exist, as the system requires.
"""

import ctypes
import errno
import fcntl
import os
import socket
import struct
from pathlib import Path

from hybrid.config import RunConfig
from hybrid.storage.remote_path import StoragePath, is_url
from workers.rendezvous.host_requirements import AUTO, LOOPBACK
from workers.rendezvous.master_address import is_loopback

_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
_SIOCGIFFLAGS, _SIOCSIFFLAGS = 0x8913, 0x8914  # linux/sockios.h
_IFF_UP = 1
_INTERFACE_FLAGS = struct.Struct("16sh22x")  # struct ifreq of netdevice(7)
# Texts of exceptions from code that connects.
_NO_NETWORK_TEXTS = (
    os.strerror(errno.ENETUNREACH),
    "Temporary failure in name resolution",
    "Name or service not known",
)


def is_wanted(config: RunConfig, folder: StoragePath) -> bool:
    """Whether a launch may use a network namespace: all its connections stay on loopback.

    Args:
        folder: the root of checkpoints, which may differ from the configuration.
    """
    section, data = config.cluster, config.data
    first_rows = (table.initial for table in config.tables.values())
    if any(map(is_url, (str(folder), data.cache_folder, *data.path, *data.test_path, *first_rows))):
        return False  # a store is reached over the machine's
    is_loopback_interface = section.interface in (AUTO, LOOPBACK)
    return section.namespace == "auto" and is_loopback_interface and is_loopback(section.master_address)


def describe_exposure(error: OSError) -> str:
    """Return the message for a launch without a namespace, because of ``error``."""
    return (
        f"no network namespace ({error.strerror}): until all roles are connected, other users of this "
        'machine can reach their ports (docs/security.md); cluster.namespace = "off" hides this line'
    )


def hint(failure: str) -> str:
    """Return the remedy for a failure in a network namespace, if the namespace caused it."""
    if not any(text in failure for text in _NO_NETWORK_TEXTS):
        return ""
    return '; the processes of launch have no network unless cluster.namespace = "off"'


def enter_network_namespace() -> None:
    """Move this process, and those that it forks later, into a new network namespace.

    Raises:
        OSError: the system does not allow it; the process is unchanged.
    """
    child = os.fork()  # tries it first, since a half-entered namespace cannot be left
    if not child:
        error = 1
        try:
            _enter()
            error = 0
        except OSError as raised:
            error = raised.errno or error
        finally:
            os._exit(error)
    if error := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
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
