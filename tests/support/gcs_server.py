"""An emulator of Google's store, a separate program: pyarrow holds the interpreter's lock while it waits.

It prints its address in a line.
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
        """Ignore clients that close the connection in the middle of a response."""


def main() -> None:
    logging.disable(logging.CRITICAL)
    storage = Storage(use_memory_fs=True)
    # Other threads change its content meanwhile.
    storage._write_config_to_file = lambda: None
    create_bucket("bucket", storage)
    server = _Server(("127.0.0.1", 0), partial(RequestHandler, storage))
    print(f"listens on http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
