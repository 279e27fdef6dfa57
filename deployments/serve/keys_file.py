"""Reads the API keys from a file that may change while the process runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from app.api.auth.keys import Authenticator, KeyRing, without_keys
from app.api.auth.limits import SharedPools
from app.config import ApiConfig, KeyConfig
from app.errors import Failure, InvalidSetup, described
from deployments.serve.settings import read_keys

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
MAX_SILENCE_S = 60.0  # maximum seconds without a check of the file: until the next check, a revoked key stays valid


class Keys:
    """The valid API keys. A changed file takes effect within `LOOK_EVERY_S`; a file with mistakes changes nothing."""

    def __init__(self, config: ApiConfig, pools: SharedPools | None = None) -> None:
        """`pools`: shared by the accounts of all keys. Raises InvalidSetup if the file has mistakes."""
        self._path = Path(config.keys_file).expanduser() if config.keys_file else None
        self._looked_at: float | None = None
        self._reported = ""
        self._state = self._look()
        # `read_keys` refuses a file without keys, so an emptied file cannot turn authentication off.
        self._ring = None if self._path is None else KeyRing(read_keys(self._path), pools=pools)
        self.authenticator: Authenticator = self._ring or without_keys(config, pools)

    async def follow(self) -> NoReturn:
        """Check the file every `LOOK_EVERY_S` and take changed keys. Errors are logged; the loop never ends."""
        self._looked_at = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                # Only the event loop may change accounts, so the thread only reads the file.
                self._take(await asyncio.to_thread(self.changed))
            except Exception as error:
                self._report(described(error))
            else:
                self._looked_at = time.monotonic()

    def check_health(self) -> None:
        """Raise Failure if no check of the file ended for `MAX_SILENCE_S`, for example because the disk hangs."""
        if self._looked_at is None:
            return
        silence_s = time.monotonic() - self._looked_at
        if silence_s > MAX_SILENCE_S:
            raise Failure(f"the file of API keys has not been read for {silence_s:.0f} s; a revoked key may be valid")

    def refresh(self) -> None:
        """Check the file now, and take the keys if the file has changed."""
        self._take(self.changed())

    def changed(self) -> tuple[tuple[int, ...], Sequence[KeyConfig]] | None:
        """Return the state and the keys of the file if the file has changed and has no mistakes, else None."""
        state = self._look()
        if self._path is None or state == self._state:
            return None
        try:
            return state, read_keys(self._path)
        except InvalidSetup as error:
            self._report(str(error))
            return None

    def _take(self, changed: tuple[tuple[int, ...], Sequence[KeyConfig]] | None) -> None:
        if changed is None or self._ring is None:
            return
        self._state, keys = changed
        self._reported = ""
        self._ring.replace(keys)
        logger.info("there are %d API keys now: %s", len(keys), ", ".join(key.name for key in keys))

    def _report(self, mistake: str) -> None:
        if mistake != self._reported:
            logger.error("the API keys stay as they were: %s", mistake)
        self._reported = mistake

    def _look(self) -> tuple[int, ...]:
        """Return a value that differs whenever the file has changed: modification time, size and inode."""
        if self._path is None:
            return ()
        try:
            stat = self._path.stat()
        except OSError:
            return (0,)
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
