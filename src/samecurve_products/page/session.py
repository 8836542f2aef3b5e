"""Who may use the server: whoever exchanged the one-time token for the session's cookie.

The token stands in the URL that the terminal shows. It serves once; the cookie that it is exchanged
for lives as long as the server, and another server's cookie is refused.
"""

import threading
from hmac import compare_digest
from secrets import token_urlsafe
from typing import Literal

_BYTES = 32  # of the token, and of the session's secret
Exchange = Literal["given", "used", "wrong"]


class Session:
    """The session of one server.

    port: the server's; cookies do not tell ports apart, so the cookie's name does
    """

    def __init__(self, port: int) -> None:
        self.token = token_urlsafe(_BYTES)
        self._secret = token_urlsafe(_BYTES)
        self._cookie = f"samecurve-{port}"
        self._lock = threading.Lock()
        self._used = False

    def exchange(self, token: str) -> Exchange:
        """Use the token up, if it is this server's and has not been used."""
        with self._lock:
            if not _equal(token, self.token):
                return "wrong"
            if self._used:
                return "used"
            self._used = True
            return "given"

    def set_cookie(self) -> str:
        """The value of the header Set-Cookie."""
        return f"{self._cookie}={self._secret}; Path=/; HttpOnly; SameSite=Strict"

    def is_open_to(self, cookies: str) -> bool:
        """Whether a request's header Cookie has the session's secret.

        Cookies tell neither ports nor, to the server, paths apart: other programs of this host may
        have set any text beside it, and others of the same name.
        """
        pairs = [pair.partition("=") for pair in cookies.split(";")]
        values = [value.strip() for name, _, value in pairs if name.strip() == self._cookie]
        return any(_equal(value, self._secret) for value in values)


def _equal(text: str, secret: str) -> bool:
    return compare_digest(text.encode(errors="replace"), secret.encode())
