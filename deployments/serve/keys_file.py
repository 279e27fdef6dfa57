"""Reads API keys from a file, and applies changes to the file while the process is running."""

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
MAX_SILENCE_S = 60.0  # without a check for this time, the process is unhealthy, because revoked keys remain valid


class Keys:
    """The valid API keys. Changes to the file apply within `LOOK_EVERY_S`. A file with mistakes is ignored."""

    def __init__(self, config: ApiConfig, pools: SharedPools | None = None) -> None:
        """`pools` is shared by the accounts of all keys. Raises InvalidSetup if the file contains mistakes."""
        self._path = Path(config.keys_file).expanduser() if config.keys_file else None
        self._looked_at: float | None = None
        self._reported = ""
        self._state = self._look()
        # `read_keys` rejects a file without keys, so emptying the file cannot disable authentication.
        self._ring = None if self._path is None else KeyRing(read_keys(self._path), pools=pools)
        self.authenticator: Authenticator = self._ring or without_keys(config, pools)

    async def follow(self) -> NoReturn:
        """Check the file every `LOOK_EVERY_S` and apply changed keys. Logs errors, and never returns."""
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
        """Raise Failure if no check has succeeded for `MAX_SILENCE_S`, for example because the disk hangs."""
        if self._looked_at is None:
            return
        silence_s = time.monotonic() - self._looked_at
        if silence_s > MAX_SILENCE_S:
            raise Failure(f"the file of API keys has not been read for {silence_s:.0f} s; revoked keys may still work")

    def refresh(self) -> None:
        """Check the file now, and apply changed keys."""
        self._take(self.changed())

    def changed(self) -> tuple[tuple[int, ...], Sequence[KeyConfig]] | None:
        """Return the file's state and keys if it has changed and contains no mistakes, or None. Logs mistakes."""
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
        logger.info("the API keys have changed; there are now %d: %s", len(keys), ", ".join(key.name for key in keys))

    def _report(self, mistake: str) -> None:
        if mistake != self._reported:
            logger.error("the API keys remain unchanged: %s", mistake)
        self._reported = mistake

    def _look(self) -> tuple[int, ...]:
        """Return the file's modification time, size and inode, by which changes are detected."""
        if self._path is None:
            return ()
        try:
            stat = self._path.stat()
        except OSError:
            return (0,)
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
