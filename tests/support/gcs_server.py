"""Google's store on loopback, a program of its own: pyarrow waits for it with the interpreter's lock held.

It says its port in a line, and ends with who has started it.
"""

import logging
from functools import partial
from http.server import ThreadingHTTPServer

from gcp_storage_emulator.handlers.buckets import create_bucket
from gcp_storage_emulator.server import RequestHandler
from gcp_storage_emulator.storage import Storage


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that has read enough of an answer closes the connection."""


def main() -> None:
    logging.disable(logging.CRITICAL)
    storage = Storage(use_memory_fs=True)
    # It would go through what other threads change meanwhile.
    storage._write_config_to_file = lambda: None
    create_bucket("bucket", storage)
    server = _Server(("127.0.0.1", 0), partial(RequestHandler, storage))
    print(f"listens on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
