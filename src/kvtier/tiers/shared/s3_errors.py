"""What obstore raises, as what it means for a tier. The texts of its errors have whole replies in them: a status, the
code of the server, and how a connection broke are looked for there, and nothing else of them is repeated."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvtier.errors import KVTierError
from kvtier.tiers.shared.store import StoreRefusedError, StoreTimeoutError, StoreUnreachableError

RIGHTS = "s3:ListBucket on the bucket; s3:GetObject, s3:PutObject and s3:DeleteObject below the prefix"
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9.]{1,64})</Code>")
_KIND = re.compile(r"HttpError \{\s*kind: (\w+)")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(?:Other\(\s*OtherError\(\s*)?(\w+)")
_ROLE = re.compile(r"169\.254\.\d|/latest/(?:api/token|meta-data)")
_LOGIN = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired")
_OTHER_REGION = ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException")


@dataclass(frozen=True, slots=True)
class Reply:
    """What can be told of an error of obstore."""

    status: int | None
    """None: there was no answer."""
    code: str
    """Of the server, for example `SlowDown`; empty if it gave none, as in reply to HEAD."""

    def __str__(self) -> str:
        return f"{self.status} {self.code}".strip()


class ServerError(KVTierError):
    """The server answers, and says that it cannot do this one thing, or not now. The connection is well."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(f"the server says: {reply}")
        self.reply = reply


class DeniedError(StoreRefusedError):
    """The login is good, and does not suffice for this."""


class MissingError(KVTierError):
    """There is no such object."""


class ExistsError(KVTierError):
    """There is such an object already, or another one is being put there at this moment."""


def _reply_in(text: str) -> Reply:
    status, code = _STATUS.search(text), _CODE.search(text)
    return Reply(int(status[1]) if status else None, code[1] if code else "")


def meaning_of(error: BaseException, bucket: str) -> KVTierError:
    """What to raise instead of `error`: StoreRefusedError, StoreTimeoutError, StoreUnreachableError, or one of those
    above."""
    from obstore.exceptions import AlreadyExistsError  # noqa: PLC0415

    text = str(error)
    reply = _reply_in(text)
    if isinstance(error, AlreadyExistsError):
        return ExistsError("it is there already")
    if isinstance(error, FileNotFoundError) and reply.code != "NoSuchBucket":
        return MissingError("it is not there")
    if reply.status is None and not _ROLE.search(text):
        return _breakage(text)
    if refusal := _refusal(text, reply, bucket):
        return StoreRefusedError(refusal)
    if reply.status == 403:
        return DeniedError(f"the server denies access: {reply}; needed: {RIGHTS}")
    return ServerError(reply)


def _refusal(text: str, reply: Reply, bucket: str) -> str:
    reason = ""
    if _ROLE.search(text):
        reason = "there are no credentials: none in the URL or the environment, and this machine has no role"
    elif reply.code == "RequestTimeTooSkewed":
        reason = "the server refuses the login: its clock and that of this machine differ too much"
    elif reply.code in _LOGIN or reply.status == 401:
        reason = f"the server refuses the login: {reply}"
    elif reply.code in ("NoSuchBucket", "InvalidBucketName"):
        reason = f"the server has no bucket {bucket!r}: {reply}"
    elif reply.code in _OTHER_REGION:
        reason = f"the bucket {bucket!r} is in another region; allowed: region=REGION"
    return reason


def _breakage(text: str) -> KVTierError:
    """Where there was no reply."""
    if certificate := _CERTIFICATE.search(text):
        return StoreRefusedError(f"the server's certificate is not accepted: {certificate[1]}")
    if "incorrectly configured region" in text:
        return StoreRefusedError("the server redirects to nowhere; allowed: region=REGION, that of the bucket")
    kind = _KIND.search(text)
    if kind and kind[1] == "Timeout":
        return StoreTimeoutError("the server did not answer in time")
    if kind and kind[1] == "Connect":
        return StoreUnreachableError("no connection to the server can be made")
    return StoreUnreachableError("the connection broke")
