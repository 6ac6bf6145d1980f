"""Whether the hosts of a job sign their messages with a secret that the first host has made.

Where a file holds the secret there is nothing to agree upon (``secrecy``). Where none is named, the first host makes
one and publishes an offer (``cluster/secret_sharing.py``) in the control store before it opens a rendezvous. A host
that has taken it signs its record, and accepts only a signed assignment; a host that has not publishes a plain record.
When all records are there, the first host knows who has the secret. If all have, everything in the attempt is signed;
else nothing is. That stands in the assignments, which are signed for all that can check it.

So whoever has no secret keeps the job from being signed and not from running; and so can whoever may write to the
store, before the hosts have met. Once an attempt is signed it stays so to its end.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from saferun.cluster.signed import LONGEST_BYTES, CannotSealError, Opened, Signer, is_signed
from saferun.coordinator.assignments import LONGEST_RECORD_BYTES, decode_assignment
from saferun.coordinator.rendezvous_round import JoinFailedError
from saferun.coordinator.resumption import SharedSecret
from saferun.coordinator.store_client import StoreClient
from saferun.text.decoding import MALFORMED, display_text, loads

if TYPE_CHECKING:
    from saferun.coordinator.secrecy import Secrecy
    from saferun.coordinator.secret_process import SecretProcess

OFFER_KEY = "saferun/offer"
_HINT = "docs/security.md says how a secret is shared; or pass --secret-file on all hosts, or --sign-messages auto"
_SECRET_BYTES = 32
_LONGEST_OFFER_BYTES = 16 << 10
_LONGEST_MESSAGE = 300
# A credential can be read for so long, and a host that comes late finds one that is not older than this.
_TTL_S, _AGAIN_S = 300, 100.0


class SecretAgreement(Signer):
    """What signs the messages of a job, or lets them be as they are.

    Args:
        sharing: how a secret gets to the other hosts.
        run_id: the job's name.
        job: the number that its first host has drawn.
        name: this host's name.
        base: where this user's run directories are; empty: there are none.
        is_required: whether there is to be no job without a secret.
        secrecy: counts what has no valid signature.
        on_made: takes the directory that an offer needs, for whoever removes it if this process cannot: path, device,
            inode.
    """

    def __init__(
        self,
        sharing: SecretProcess,
        run_id: str,
        job: str,
        *,
        name: str,
        base: str,
        is_required: bool,
        secrecy: Secrecy,
        on_made: Callable[[list[Any]], None],
    ) -> None:
        self.job = job
        self.why = ""  # what is shared by no means, or not with all
        self.channel = ""  # by which it is shared: munge, or a file
        self.is_agreed = False
        self.refused: set[int] = set()  # on the first host: who did not take what each host has to take
        self._sharing = sharing
        self._run_id = run_id
        self._name = name
        self._base = base
        self._is_required = is_required
        self._secrecy = secrecy
        self._on_made = on_made
        self._strict: Signer | None = None
        self._secret = b""
        self._offered_at: float | None = None
        self._has: dict[str, bool] = {}  # by the key of a host's record, whether the host has signed it

    def __repr__(self) -> str:
        return "SecretAgreement(hidden)"

    @property
    def signs(self) -> bool:
        """Whether this host has a secret."""
        return self._strict is not None

    @property
    def shared(self) -> SharedSecret:
        """What a replacement of this process adopts; nothing where the messages of the attempt are not signed."""
        return SharedSecret(self._secret.hex(), self.channel) if self.is_agreed else SharedSecret()

    def resume(self, shared: SharedSecret) -> None:
        """Go on with what the hosts have agreed on.

        Raises:
            CannotSealError: evidence cannot be encrypted.
            ValueError: it is no secret.
        """
        if shared.secret:
            self._adopt(bytes.fromhex(shared.secret))
            self.channel, self.is_agreed = shared.way, True

    def _adopt(self, secret: bytes) -> None:
        from saferun.cluster.secret import JobSecret

        name = json.dumps([self._run_id, self.job])
        self._strict = Signer(JobSecret(secret), name, on_ignored=self._secrecy.ignore)
        self._secret = secret

    # --------------------------------------------------------------------------------------------------- the first host

    def offer(self, client: StoreClient) -> None:
        """Publish an offer, before the other hosts can find the rendezvous.

        Raises:
            StoreBrokenError: the store is gone.
        """
        secret = self._secret or os.urandom(_SECRET_BYTES)
        answer = self._sharing.offer(secret, self._run_id, self.job, _TTL_S, self._base)
        text, made, why = str(answer.get("text") or ""), answer.get("made"), str(answer.get("why") or "no answer")
        if made:
            self._on_made(made)
        self._offered_at = time.monotonic()
        try:
            if text and self._strict is None:
                self._adopt(secret)
        except CannotSealError as error:
            text, why = "", f"evidence cannot be encrypted: {error}"
        self.why = "" if text else display_text(why, _LONGEST_MESSAGE)
        if text:
            self.channel = "file" if made else "munge"
            client.set(OFFER_KEY, text)

    def keep(self, client: StoreClient) -> None:
        """Make the offer again before it expires, while hosts are waited for."""
        if self.channel == "munge" and self._offered_at is not None and time.monotonic() - self._offered_at > _AGAIN_S:
            self.offer(client)

    def conclude(self, prefix: str, names: Mapping[int, str]) -> None:
        """All records are there, which says whether everything is signed from now on.

        Args:
            prefix: of the rendezvous's keys.
            names: of the other hosts, by the numbers under which they have written their records.

        Raises:
            JoinFailedError: it is not, and is to be.
        """
        without = [name for host, name in names.items() if not self._has.get(f"{prefix}host/{host}")]
        self.is_agreed = self._strict is not None and not without
        if self.channel == "file":
            self._sharing.withdraw()  # all who could have taken it
        if self._strict is not None and without:
            more = f" and {len(without) - 4} more" if len(without) > 4 else ""  # noqa: PLR2004
            self.why = f"{', '.join(without[:4])}{more} did not take the secret"
        if self._is_required and not self.is_agreed:
            self.refused = {host for host in names if not self._has.get(f"{prefix}host/{host}")}
            raise _refusal(f"the hosts share no secret, as {self.why}")

    @property
    def fields(self) -> dict[str, str]:
        """What the assignments hold of it."""
        return {"signed": "yes" if self.is_agreed else "no"}

    # ------------------------------------------------------------------------------------------------------- the others

    def take(self, client: StoreClient) -> None:
        """Take what the first host offers, if it does.

        Raises:
            JoinFailedError: there is nothing that this host can take, and there is to be.
            StoreBrokenError: the store is gone.
        """
        if self._strict is not None:
            return
        stored = client.find(OFFER_KEY)
        if stored is None:
            self.why = "the leader offers no secret"
        elif len(stored) > _LONGEST_OFFER_BYTES:
            self.why = "the offer is invalid"
        else:
            secret, self.why = self._sharing.take(stored.decode(errors="replace"), self._run_id, self.job, self._base)
            self.why = display_text(self.why, _LONGEST_MESSAGE)
            self.channel = "munge" if b'"munge"' in stored else "file"
            try:
                if secret:
                    self._adopt(secret)
            except CannotSealError as error:
                self.why = f"evidence cannot be encrypted: {error}"
        if self._is_required and self._strict is None:
            raise _refusal(f"the hosts share no secret, as {self._name} did not take it: {self.why}")

    def join(self, assignment: bytes) -> None:
        """This host has its assignment, in which it stands whether everything is signed from now on.

        Raises:
            JoinFailedError: it is not, and is to be.
        """
        try:
            is_signed_for_all = loads(assignment, longest=LONGEST_RECORD_BYTES).get("signed") == "yes"
        except MALFORMED:
            is_signed_for_all = False
        self.is_agreed = is_signed_for_all and self._strict is not None
        if self._is_required and not self.is_agreed:
            raise _refusal("the hosts share no secret, as not all of them took it")

    # ----------------------------------------------------------------------------------------------------- all messages

    def protect(self, key: str, content: str | bytes, counter: int = 0) -> bytes:
        """The value to be stored; see ``Signer``."""
        if self._strict is not None and self._is_signed(key):
            return self._strict.protect(key, content, counter)
        return content.encode() if isinstance(content, str) else content

    def _is_signed(self, key: str) -> bool:
        kind = _kind_of(key)
        if kind == "assignment":
            return self._has.get(key.replace("/assignment/", "/host/"), False)
        return kind == "host" or (kind == "attempt" and self.is_agreed)

    def open(self, key: str, stored: bytes, *, longest: int = LONGEST_BYTES) -> Opened | None:
        """A stored value; None: it is not signed, where it has to be, or not as it should be."""
        return self._open(key, stored, longest=longest)

    def open_newest(self, key: str, stored: bytes) -> Opened | None:
        """The same of a value that is written again."""
        return self._open(key, stored, longest=LONGEST_BYTES, newest=True)

    def _open(self, key: str, stored: bytes, *, longest: int, newest: bool = False) -> Opened | None:
        kind, has_signature, strict = _kind_of(key), is_signed(stored), self._strict
        if strict is None:
            # What others have signed this host cannot read; where that matters the value is plain.
            return Opened(stored, 0) if len(stored) <= longest and not has_signature else None
        if kind == "attempt" and self.is_agreed:
            return strict.open_newest(key, stored) if newest else strict.open(key, stored, longest=longest)
        if kind == "host":
            self._has[key] = has_signature
        elif kind == "assignment" and not has_signature and decode_assignment(stored) is not None:
            # The first host can sign it, and does.
            self._secrecy.ignore(key)
            return None
        if has_signature:
            return strict.open(key, stored, longest=longest)
        return Opened(stored, 0) if len(stored) <= longest else None


def _kind_of(key: str) -> str:
    """``host`` (a record), ``assignment``, ``attempt`` (messages between hosts in one), or empty."""
    first, _, rest = key.partition("/")
    if first[:1] == "a" and first[1:].isdigit():
        return "attempt"
    kind = rest.partition("/")[0]
    return kind if first[:1] == "r" and first[1:].isdigit() and kind in {"host", "assignment"} else ""


def _refusal(what: str) -> JoinFailedError:
    return JoinFailedError(what, _HINT, kind="usage")


def signed_fields(signer: Signer | None) -> dict[str, str]:
    """By which secret the messages are signed, or why by none."""
    if not isinstance(signer, SecretAgreement):
        return {"signed": "secret file" if signer is not None else ""}
    if signer.is_agreed:
        return {"signed": signer.channel}
    return {"signed": "", "unsigned_why": signer.why, "offered": signer.channel}
